"""What goes into a session and what comes out of it, whichever dialect the client speaks.

Every dialect is brought to this one form before anything is rendered: that is why all of them can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ramify.render import ParseProblem, ToolSchema
from ramify.trace import Media, Message, Usage

ReplyFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model call as the client asks for it.

    `messages` are the whole conversation, or, with `after`, only what follows the reply at that node of the trace.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""
    sampling_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The client's wishes: temperature, top_p, top_k, min_p, max_tokens, seed, and `stop`, a list of strings."""
    parent_node: int | None = None
    idempotency_key: str | None = None
    """An idempotency key: requests that share one are one call."""
    retry_count: int = 0
    """How often the client says it has sent this request before."""
    media: Mapping[str, Media] = field(default_factory=dict[str, Media])
    """What the media parts of the messages show, by hash."""
    is_remote: bool = False
    """Whether it came over HTTP; False if the harness made it in this process."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The answer, already in the trace as `node`."""

    message: Message
    finish_reason: ReplyFinishReason
    usage: Usage
    node: int
    call_id: str
    problems: tuple[ParseProblem, ...] = ()
