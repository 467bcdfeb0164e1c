"""The request and reply of a model call, in a form that is common to all dialects.

Requests of every dialect are converted to this form before rendering, so that all of them can be trained on.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from ramify.model.render import ParseProblem, ReplyConstraint, ToolSchema
from ramify.trace import Media, Message, Usage

ReplyFinishReason = Literal["stop", "length", "tool_calls"]
SUMMARY_REQUEST = Message(
    "user",
    "This conversation is becoming too long. Do not work on the task now and do not call tools. Write a summary from "
    "which you can go on: what you did, what you found out, what is left to do. Only the task and your summary remain.",
)


class ModelRequest(Struct, frozen=True):
    """A model call as requested by a client.

    `messages` are the whole conversation or, with `parent_node`, only the messages after the reply at that node.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""
    sampling_overrides: Mapping[str, Any] = {}
    """Sampling parameters of the client: temperature, top_p, top_k, min_p, max_tokens, seed, and stop (strings)."""
    parent_node: int | None = None
    idempotency_key: str | None = None
    """Requests over HTTP with the same key share one call."""
    retry_count: int = 0
    """How often the client has sent this request before, according to its headers."""
    media: Mapping[str, Media] = {}
    """The media of the messages, by hash."""
    is_remote: bool = False
    """Whether the request came over HTTP; False if the harness made it in this process."""
    prefill: str = ""
    """The beginning of the reply, which the client has written and the policy continues."""
    constraint: ReplyConstraint | None = None
    """What the client requires of the reply, if it is JSON or tool calls."""
    allows_calls: bool = True
    """Whether tool calls in the reply are parsed; otherwise their text is content."""
    fork_reason: str = ""
    """Why the request leaves the recorded conversations, if the client says so; by default it is inferred."""


class ModelReply(Struct, frozen=True):
    """The recorded reply to a model call: `node` is its node in the trace."""

    message: Message
    finish_reason: ReplyFinishReason
    usage: Usage
    node: int
    call_id: str
    problems: tuple[ParseProblem, ...] = ()
    stop_string: str | None = None
    """The client's stop string that ended the reply."""
    created_at: int = field(default_factory=lambda: int(time.time()))
    """When the reply was made, in seconds since 1970."""


class ParsedRequest(Struct, frozen=True):
    """A parsed client request, and the form of its response."""

    request: ModelRequest
    stream: bool = False
    include_usage: bool = True
    """Whether a streamed response ends with token counts."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools that take free text instead of JSON arguments."""
    namespaced_tools: Mapping[str, tuple[str, str]] = {}
    """Namespace and name of namespaced tools, by the name that the model sees."""
    encrypts_reasoning: bool = False
    """Whether the client also expects its reasoning as a text that only the server reads."""
    previous_call_id: str | None = None
    """The id of the call whose reply the messages follow, if the client does not send the whole history."""
    conversation_id: str | None = None
    """The id of the conversation that the reply is added to, if the client names one."""
    text_format: Mapping[str, Any] | None = None
    """The `text.format` of the Responses API, which the response repeats."""
    is_stored: bool = False
    """Whether later requests may refer to the reply."""
