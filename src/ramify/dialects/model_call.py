"""The request and reply of a model call, in a form that is common to all dialects.

Requests of every dialect are converted to this form before rendering, so that all of them can be trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ramify.render import ParseProblem, ToolSchema
from ramify.trace import Media, Message, Usage

ReplyFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model call as requested by a client.

    `messages` are the whole conversation or, with `parent_node`, only the messages after the reply at that node.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""
    sampling_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters of the client: temperature, top_p, top_k, min_p, max_tokens, seed, and stop (strings)."""
    parent_node: int | None = None
    idempotency_key: str | None = None
    """Requests with the same key share one call."""
    retry_count: int = 0
    """How often the client has sent this request before, according to its headers."""
    media: Mapping[str, Media] = field(default_factory=dict[str, Media])
    """The media of the messages, by hash."""
    is_remote: bool = False
    """Whether the request came over HTTP; False if the harness made it in this process."""
    fork_reason: str = ""
    """Why the request leaves the recorded conversations, if the client says so; by default it is inferred."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The recorded reply to a model call: `node` is its node in the trace."""

    message: Message
    finish_reason: ReplyFinishReason
    usage: Usage
    node: int
    call_id: str
    problems: tuple[ParseProblem, ...] = ()
