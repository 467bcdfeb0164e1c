"""The content of a node besides its tokens: the message, the model call, weight versions and media.

Message and call of a node are stored as one msgpack record and decoded on access, so a rollout that is not read costs
little more than its text.
"""

import hashlib
import re
from typing import Any, NamedTuple

import msgspec

SHA256 = re.compile(r"[0-9a-f]{64}")


class TextPart(msgspec.Struct, frozen=True, gc=False, tag="text", tag_field="type", forbid_unknown_fields=True):
    """A text part of a message content."""

    text: str


class MediaPart(msgspec.Struct, frozen=True, gc=False, tag="media", tag_field="type", forbid_unknown_fields=True):
    """A media part of a message content; `hash` refers to the trace's media table."""

    hash: str


Part = TextPart | MediaPart


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tool call as the model wrote it.

    - `id`: the id of the call, which the tool message answers.
    - `name`: the name of the tool.
    - `arguments`: the arguments as JSON text, not parsed.
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A chat message.

    - `role`: "system", "user", "assistant" or "tool".
    - `content`: a text, or a tuple of text parts and media parts.
    - `reasoning`: the reasoning of the model, if it wrote any.
    - `tool_calls`: the tool calls of an assistant message.
    - `tool_call_id`: the id of the call that a tool message answers.
    """

    role: str
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of the content without media."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Usage(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Token counts that the server reported; `cached_tokens` of the prompt were in its prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class ModelCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One model call: the requested and served model, sampling parameters, result and usage.

    `start_time` and `end_time` are Unix seconds. The order of fields is part of the format.
    """

    id: str
    requested_model: str = ""
    served_model: str = ""
    sampling_params: dict[str, Any] = {}
    finish_reason: str = ""
    usage: Usage = Usage()
    start_time: float = 0.0
    end_time: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """The part of a node that is stored as msgpack."""

    message: Message
    call: ModelCall | None = None


class VersionSpan(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """`count` consecutive sampled tokens from one version of the policy's weights."""

    policy: str
    incarnation: int
    step: int
    count: int


class Media(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """An entry of the media table; each image is stored once. `hash` is the SHA-256 of `data`."""

    hash: str
    mime: str
    data: bytes = b""

    @classmethod
    def from_bytes(cls, data: bytes, mime: str) -> "Media":
        """Return an entry with the hash of `data`."""
        return cls(hashlib.sha256(data).hexdigest(), mime, data)

    @property
    def has_valid_hash(self) -> bool:
        """Whether `hash` is a SHA-256, and matches `data` if there is any. Hashes become names of files."""
        if not SHA256.fullmatch(self.hash):
            return False
        return not self.data or self.hash == hashlib.sha256(self.data).hexdigest()


class MediaRef(NamedTuple):
    """Media in a message: index `media` in the table, index `part` in the content, placeholder tokens [start, stop)."""

    part: int
    media: int
    start: int
    stop: int
