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
from ramify.gateway.exchange import Reply, Request
from ramify.gateway.media import read_url
from ramify.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, TextPart

Part = TextPart | MediaPart

STATUS: dict[type[RamifyError], int] = {
    SecretUnknown: 401,
    RequestInvalid: 400,
    TemplateRefused: 400,
    QueueFull: 503,
    DeadlineExceeded: 504,
}
TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a client sent it, and what its answer has to look like."""

    request: Request
    stream: bool = False
    usage: bool = True
    """Whether a streamed answer ends with token counts."""
    custom: frozenset[str] = frozenset()
    """Tools that take free text instead of arguments."""
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Namespace and name of tools that the client has put into namespaces, by the name that the model sees."""
    continues: str | None = None
    """The call whose reply the messages follow, where the client does not repeat what came before."""


class Dialect(Protocol):
    """One way to ask and to answer."""

    ping: bytes
    """What a stream says while there is nothing to say."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """The request in a body; fields nobody here knows are left aside."""
        ...

    def write(self, asked: Asked, reply: Reply) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def stream(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        """The answer as events."""
        ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The answer to how many tokens a prompt has."""
        ...

    def refusal(self, error: RamifyError) -> dict[str, Any]:
        """A failure as one object."""
        ...

    def broken(self, error: RamifyError) -> bytes:
        """A failure in the middle of a stream."""
        ...


def status_of(error: RamifyError) -> int:
    """What the policy used up, and what the client did wrong, is 400: SDKs do not send that again."""
    if error.blame == "policy":
        return 400
    return STATUS.get(type(error), 502 if error.retryable else 500)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return head + b"data: %s\n\n" % msgspec.json.encode(data)


def code_of(error: RamifyError) -> str:
    """The code that agents look for to shorten their history, or the failure's name."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    return "budget_exceeded" if isinstance(error, BudgetExceeded) else error.name


@dataclass(slots=True)
class Reader:
    """Collects the messages of a body, and the media they show."""

    messages: list[Message] = field(default_factory=list[Message])
    media: dict[str, Media] = field(default_factory=dict[str, Media])

    def say(self, role: str, content: Any, **more: Any) -> None:
        """Add a message. System prompts at the beginning become one, as templates want it."""
        said = Message(role, self.content(content), **more)
        _check_names(said)
        if role == "system" and self.messages and all(message.role == "system" for message in self.messages):
            before = self.messages.pop()
            said = replace(said, content=f"{before.text}\n\n{said.text}")
        self.messages.append(said)

    def content(self, content: Any) -> str | tuple[Part, ...]:
        """Content of text, or of parts where some are images."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise RequestInvalid(f"content: expected a text or a list of parts, found {content!r:.80}")
        parts = [part for entry in content if (part := self.part(entry)) is not None]
        if any(isinstance(part, MediaPart) for part in parts):
            return tuple(parts)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def part(self, entry: Any) -> Part | None:
        """One part; None for a kind that says nothing to the model."""
        if isinstance(entry, str):
            return TextPart(entry)
        kind = entry.get("type")
        if kind in TEXT_TYPES:
            return TextPart(str(entry.get("text") or entry.get("refusal") or ""))
        if kind in ("image_url", "input_image"):
            found = entry["image_url"]
            return self.show(read_url(found if isinstance(found, str) else found["url"]))
        raise RequestInvalid(f"content: a part of type {kind!r} cannot be shown to a model; send text or images")

    def show(self, media: Media) -> MediaPart:
        """A part that shows `media`."""
        self.media[media.hash] = media
        return MediaPart(media.hash)


def _check_names(said: Message) -> None:
    """Refuse ids and names that are no text: no template could write them, and no reader of the trace read them."""
    names = [name for call in said.tool_calls for name in (call.id, call.name)]
    for name in [*names, said.tool_call_id or ""]:
        if not isinstance(name, str):
            raise RequestInvalid(f"{said.role}: the id or name of a tool call must be a text, found {name!r:.80}")


def wishes(body: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The sampling fields a body sets, by our names; `names` says what the dialect calls them."""
    known = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")} | names
    return {ours: body[theirs] for ours, theirs in known.items() if body.get(theirs) is not None}


def function(name: str, description: Any, parameters: Any) -> ToolSchema:
    """A tool as the model is told about it."""
    schema = parameters or {"type": "object", "properties": {}}
    said = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **said, "parameters": schema}}


def read_tools(tools: Any, choice: Any, read: Any) -> tuple[ToolSchema, ...]:
    """The tools of a body, unless it says that none may be used."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    found: Iterable[Sequence[ToolSchema]] = () if kind == "none" else map(read, tools or ())
    return tuple(tool for row in found for tool in row)
