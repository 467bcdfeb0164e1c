"""Parsing of messages, images and tools, as far as the dialects share it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ramify.config.schema import is_dict, is_list
from ramify.dialects.media import media_from_url
from ramify.dialects.model_call import ModelRequest
from ramify.errors import RequestInvalid
from ramify.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, TextPart

ContentPart = TextPart | MediaPart
ToolEntryParser = Callable[[Mapping[str, Any]], ToolSchema | None]
"""Parses one entry of `tools`; None for a tool that only the servers of the API's provider run."""

TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


@dataclass(slots=True)
class MessageParser:
    """Collects the messages of a body and their media; with `read_files` also from files, for environments."""

    messages: list[Message] = field(default_factory=list[Message])
    media: dict[str, Media] = field(default_factory=dict[str, Media])
    read_files: bool = False

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
        if not is_list(content):
            raise RequestInvalid(f"content: expected a string or a list of parts, found {content!r:.80}")
        parts = [self.parse_part(entry) for entry in content]
        if any(isinstance(part, MediaPart) for part in parts):
            return tuple(parts)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def parse_part(self, entry: Any) -> ContentPart:
        """Parse one part of a content: a text or an image."""
        if isinstance(entry, str):
            return TextPart(entry)
        kind = entry.get("type")
        if kind in TEXT_TYPES:
            return TextPart(str(entry.get("text") or entry.get("refusal") or ""))
        if kind in ("image_url", "input_image"):
            image_url = entry.get("image_url")
            if not image_url:
                raise RequestInvalid(f"content: a part of type {kind!r} has no image_url")
            url = image_url if isinstance(image_url, str) else image_url["url"]
            return self.add_media(media_from_url(url, read_files=self.read_files))
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
        choice_type = choice.get("type") if is_dict(choice) else choice
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
    names: list[Any] = [name for call in message.tool_calls for name in (call.id, call.name)]
    for name in [*names, message.tool_call_id or ""]:
        if not isinstance(name, str):
            raise RequestInvalid(f"{message.role}: the id or name of a tool call must be a string, found {name!r:.80}")


def build_function_tool(name: str, description: Any, parameters: Any) -> ToolSchema:
    """Build the schema of a function tool."""
    schema = parameters or {"type": "object", "properties": dict[str, Any]()}
    optional = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **optional, "parameters": schema}}
