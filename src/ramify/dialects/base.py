"""The `Dialect` base class, and the parsing of texts, images and tools that the dialects share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from ramify.dialects.media import media_from_url
from ramify.dialects.model_call import ModelReply, ModelRequest
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
from ramify.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, TextPart

ContentPart = TextPart | MediaPart
ToolEntryParser = Callable[[Mapping[str, Any]], ToolSchema | None]
"""Parses one entry of `tools`; None for a tool that only the servers of the API's provider run."""

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
    """A parsed client request, and the form of its response."""

    request: ModelRequest
    stream: bool = False
    include_usage: bool = True
    """Whether a streamed response ends with token counts."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools that take free text instead of JSON arguments."""
    namespaced_tools: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Namespace and name of namespaced tools, by the name that the model sees."""
    previous_call_id: str | None = None
    """The id of the call whose reply the messages follow, if the client does not send the whole history."""


class Dialect(ABC):
    """The request and response format of one API."""

    keepalive = b": waiting\n\n"
    """The bytes that a waiting stream sends."""

    @abstractmethod
    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        """Parse the body of a request; unknown fields are ignored."""

    @abstractmethod
    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Format the reply as one object."""

    @abstractmethod
    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """Yield the reply as server-sent events."""

    @abstractmethod
    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Format the response to a request for the number of prompt tokens."""

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        """Format an error as one object; by default in the format of OpenAI."""
        return {"error": {"message": error.message, "type": error.name, "param": None, "code": get_error_code(error)}}

    def format_stream_error(self, error: RamifyError) -> bytes:
        """Format an error inside a stream."""
        return format_sse(self.format_error(error))


def get_http_status(error: RamifyError) -> int:
    """Return the HTTP status of an error. Exhausted limits and invalid requests are 400, which SDKs do not retry."""
    if error.blame == "policy":
        return 400
    return HTTP_STATUS.get(type(error), 502 if error.retryable else 500)


def format_sse(data: Mapping[str, Any], event_name: str | None = None) -> bytes:
    """Format one server-sent event."""
    head = b"" if event_name is None else b"event: %s\n" % event_name.encode()
    return head + b"data: %s\n\n" % msgspec.json.encode(data)


def get_error_code(error: RamifyError) -> str:
    """Return the code by which agents recognize that they must shorten their history, or the error's name."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    return "budget_exceeded" if isinstance(error, BudgetExceeded) else error.name


@dataclass(slots=True)
class MessageParser:
    """Collects the messages of a body and their media."""

    messages: list[Message] = field(default_factory=list[Message])
    media: dict[str, Media] = field(default_factory=dict[str, Media])

    def add_message(self, role: str, content: Any, **fields: Any) -> None:
        """Add a message. System messages at the start are merged, because templates expect at most one."""
        message = Message(role, self.parse_content(content), **fields)
        _check_tool_call_names(message)
        if role == "system" and self.messages and all(message.role == "system" for message in self.messages):
            previous = self.messages.pop()
            message = replace(message, content=f"{previous.text}\n\n{message.text}")
        self.messages.append(message)

    def parse_content(self, content: Any) -> str | tuple[ContentPart, ...]:
        """Parse content to a text, or to parts if some are images."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise RequestInvalid(f"content: expected a string or a list of parts, found {content!r:.80}")
        parts = [part for entry in content if (part := self.parse_part(entry)) is not None]
        if any(isinstance(part, MediaPart) for part in parts):
            return tuple(parts)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def parse_part(self, entry: Any) -> ContentPart | None:
        """Parse one part of a content; None if it has nothing for the model."""
        if isinstance(entry, str):
            return TextPart(entry)
        kind = entry.get("type")
        if kind in TEXT_TYPES:
            return TextPart(str(entry.get("text") or entry.get("refusal") or ""))
        if kind in ("image_url", "input_image"):
            image_url = entry["image_url"]
            return self.add_media(media_from_url(image_url if isinstance(image_url, str) else image_url["url"]))
        raise RequestInvalid(f"content: parts of type {kind!r} are not supported; send text or images")

    def add_media(self, media: Media) -> MediaPart:
        """Add an image and return the part that refers to it."""
        self.media[media.hash] = media
        return MediaPart(media.hash)

    def build_request(
        self, body: Mapping[str, Any], tools: Any, parse_tool: ToolEntryParser, **field_names: str
    ) -> ModelRequest:
        """Build the request of a body whose messages were added; `tool_choice` may disable the tools.

        `field_names` are the dialect's names of the sampling parameters `stop` and `max_tokens`.
        """
        choice = body.get("tool_choice")
        choice_type = choice.get("type") if isinstance(choice, Mapping) else choice
        parsed_tools = map(parse_tool, () if choice_type == "none" else tools or ())
        fields = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")} | field_names
        return ModelRequest(
            messages=tuple(self.messages),
            tools=tuple(tool for tool in parsed_tools if tool is not None),
            model=str(body.get("model") or ""),
            sampling_overrides={name: body[key] for name, key in fields.items() if body.get(key) is not None},
            media=self.media,
        )


def _check_tool_call_names(message: Message) -> None:
    """Raise RequestInvalid for ids and names that are not strings: they can be neither rendered nor stored."""
    names = [name for call in message.tool_calls for name in (call.id, call.name)]
    for name in [*names, message.tool_call_id or ""]:
        if not isinstance(name, str):
            raise RequestInvalid(f"{message.role}: the id or name of a tool call must be a string, found {name!r:.80}")


def build_function_tool(name: str, description: Any, parameters: Any) -> ToolSchema:
    """Build the schema of a function tool."""
    schema = parameters or {"type": "object", "properties": {}}
    optional = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **optional, "parameters": schema}}
