"""What the dialects share: the form they give to a server, and how they read text, images and tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from ramify.errors import (
    BudgetExceeded,
    ContextOverflow,
    DeadlineExceeded,
    QueueFull,
    RamifyError,
    RequestInvalid,
    SecretUnknown,
    TemplateRefused,
)
from ramify.gateway.media import media_from_url
from ramify.gateway.model_call import ModelReply, ModelRequest
from ramify.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, TextPart

ContentPart = TextPart | MediaPart

HTTP_STATUS: dict[type[RamifyError], int] = {
    SecretUnknown: 401,
    RequestInvalid: 400,
    TemplateRefused: 400,
    QueueFull: 503,
    DeadlineExceeded: 504,
}
TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as a client sent it, and what its answer has to look like."""

    request: ModelRequest
    stream: bool = False
    include_usage: bool = True
    """Whether a streamed answer ends with token counts."""
    custom_tools: frozenset[str] = frozenset()
    """Tools that take free text instead of arguments."""
    namespaced_tools: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Namespace and name of tools that the client has put into namespaces, by the name that the model sees."""
    previous_call_id: str | None = None
    """The call whose reply the messages follow, where the client does not repeat what came before."""


class Dialect(Protocol):
    """One way to ask and to answer."""

    keepalive: bytes
    """What a stream says while there is nothing to say."""

    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        """The request in a body; fields nobody here knows are left aside."""
        ...

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """The answer as events."""
        ...

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """The answer to how many tokens a prompt has."""
        ...

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        """A failure as one object."""
        ...

    def format_stream_error(self, error: RamifyError) -> bytes:
        """A failure in the middle of a stream."""
        ...


def get_http_status(error: RamifyError) -> int:
    """What the policy used up, and what the client did wrong, is 400: SDKs do not send that again."""
    if error.blame == "policy":
        return 400
    return HTTP_STATUS.get(type(error), 502 if error.retryable else 500)


def format_sse(data: Mapping[str, Any], event_name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event_name is None else b"event: %s\n" % event_name.encode()
    return head + b"data: %s\n\n" % msgspec.json.encode(data)


def get_error_code(error: RamifyError) -> str:
    """The code that agents look for to shorten their history, or the failure's name."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    return "budget_exceeded" if isinstance(error, BudgetExceeded) else error.name


@dataclass(slots=True)
class MessageParser:
    """Collects the messages of a body, and the media they show."""

    messages: list[Message] = field(default_factory=list[Message])
    media: dict[str, Media] = field(default_factory=dict[str, Media])

    def add_message(self, role: str, content: Any, **fields: Any) -> None:
        """Add a message. System prompts at the beginning become one, as templates want it."""
        said = Message(role, self.parse_content(content), **fields)
        _check_tool_call_names(said)
        if role == "system" and self.messages and all(message.role == "system" for message in self.messages):
            before = self.messages.pop()
            said = replace(said, content=f"{before.text}\n\n{said.text}")
        self.messages.append(said)

    def parse_content(self, content: Any) -> str | tuple[ContentPart, ...]:
        """Content of text, or of parts where some are images."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise RequestInvalid(f"content: expected a text or a list of parts, found {content!r:.80}")
        parts = [part for entry in content if (part := self.parse_part(entry)) is not None]
        if any(isinstance(part, MediaPart) for part in parts):
            return tuple(parts)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def parse_part(self, entry: Any) -> ContentPart | None:
        """One part; None for a kind that says nothing to the model."""
        if isinstance(entry, str):
            return TextPart(entry)
        kind = entry.get("type")
        if kind in TEXT_TYPES:
            return TextPart(str(entry.get("text") or entry.get("refusal") or ""))
        if kind in ("image_url", "input_image"):
            found = entry["image_url"]
            return self.add_media(media_from_url(found if isinstance(found, str) else found["url"]))
        raise RequestInvalid(f"content: a part of type {kind!r} cannot be shown to a model; send text or images")

    def add_media(self, media: Media) -> MediaPart:
        """A part that shows `media`."""
        self.media[media.hash] = media
        return MediaPart(media.hash)


def _check_tool_call_names(message: Message) -> None:
    """Refuse ids and names that are no text: no template could write them, and no reader of the trace read them."""
    names = [name for call in message.tool_calls for name in (call.id, call.name)]
    for name in [*names, message.tool_call_id or ""]:
        if not isinstance(name, str):
            raise RequestInvalid(f"{message.role}: the id or name of a tool call must be a text, found {name!r:.80}")


def parse_sampling_overrides(body: Mapping[str, Any], **field_names: str) -> dict[str, Any]:
    """The sampling fields a body sets, by our names; `names` says what the dialect calls them."""
    known = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")} | field_names
    return {ours: body[theirs] for ours, theirs in known.items() if body.get(theirs) is not None}


def build_function_tool(name: str, description: Any, parameters: Any) -> ToolSchema:
    """A tool as the model is told about it."""
    schema = parameters or {"type": "object", "properties": {}}
    said = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **said, "parameters": schema}}


def parse_tools(tools: Any, tool_choice: Any, parse_tool: Any) -> tuple[ToolSchema, ...]:
    """The tools of a body, unless it says that none may be used."""
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else tool_choice
    found: Iterable[Sequence[ToolSchema]] = () if kind == "none" else map(parse_tool, tools or ())
    return tuple(tool for row in found for tool in row)
