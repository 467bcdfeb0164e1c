"""What a node of a trace says: the message, the model call that produced it, the weights and media behind it.

These are plain frozen records without tokens. A node keeps them as one msgpack record and decodes it when somebody
looks, so a rollout that nobody reads costs its text and little more.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec


class TextPart(msgspec.Struct, frozen=True, gc=False, tag="text", tag_field="type", forbid_unknown_fields=True):
    """A piece of text in a message of several parts."""

    text: str


class MediaPart(msgspec.Struct, frozen=True, gc=False, tag="media", tag_field="type", forbid_unknown_fields=True):
    """A piece of media in a message of several parts; the bytes are in the trace's media table under this hash."""

    hash: str


Part = TextPart | MediaPart


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tool call as the model wrote it: `arguments` is the JSON text, not the parsed value."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    role: str
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of the content, media left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Usage(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Token counts as the server reported them; `cached` of the prompt's came out of its prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class ModelCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One model call: what was asked of whom, how it was sampled, how it ended. `start` and `end` are Unix seconds."""

    id: str
    requested_model: str = ""
    served_model: str = ""
    sampling_params: dict[str, Any] = {}
    finish_reason: str = ""
    usage: Usage = Usage()
    start_time: float = 0.0
    end_time: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything a node holds besides numbers."""

    message: Message
    call: ModelCall | None = None


class VersionRun(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """`count` sampled tokens in a row that came from one version of the policy's weights."""

    policy: str
    incarnation: int
    step: int
    count: int


class Media(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """An entry of the media table: an image once, however many messages show it."""

    hash: str
    mime: str
    data: bytes = b""

    @classmethod
    def from_bytes(cls, data: bytes, mime: str) -> Media:
        return cls(hashlib.sha256(data).hexdigest(), mime, data)


class MediaRef(NamedTuple):
    """Media in a message: entry `media` of the table, part `part` of the content, standing at tokens [start, stop)."""

    part: int
    media: int
    start: int
    stop: int
