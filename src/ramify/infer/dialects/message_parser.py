"""Parsing of messages, images and tools, as far as the dialects share it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec.structs import replace

from ramify.core.config.schema import is_list, is_tuple
from ramify.core.errors import ImageInvalid, RequestInvalid
from ramify.infer.dialects.media import (
    IMAGE_PART_EXAMPLE,
    IMAGE_PART_TYPES,
    ReadUrl,
    describe_value,
    find_image_value,
    parse_client_url,
    read_image,
)
from ramify.infer.dialects.model_call import ModelRequest
from ramify.infer.dialects.structured_output import forbids_calls, parse_constraint
from ramify.model.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, TextPart

ContentPart = TextPart | MediaPart
ToolEntryParser = Callable[[Mapping[str, Any]], ToolSchema | None]
"""Parses one entry of `tools`; None for a tool that only the servers of the API's provider run."""

TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


@dataclass(slots=True)
class MessageParser:
    """Collects messages and their media. `read_url` reads the URL of an image; it depends on who sent the messages."""

    messages: list[Message] = field(default_factory=list[Message])
    media: dict[str, Media] = field(default_factory=dict[str, Media])
    read_url: ReadUrl = parse_client_url
    prefill: str = ""  # the beginning of the reply, if the client has written it

    def add_message(self, role: str, content: Any, **fields: Any) -> None:
        """Add a message. System messages at the start are merged, because templates expect at most one."""
        message = Message(role, self.parse_content(content), **fields)
        _check_tool_call_names(message)
        if role == "system" and self.messages and all(message.role == "system" for message in self.messages):
            previous = self.messages.pop()
            message = replace(message, content=f"{previous.text}\n\n{message.text}")
        self.messages.append(message)

    @property
    def ends_with_assistant_text(self) -> bool:
        """Whether the last message is a text of the assistant, without reasoning and tool calls."""
        last = self.messages[-1] if self.messages else Message("")
        return last.role == "assistant" and bool(last.text) and not last.tool_calls and not last.reasoning

    def split_off_prefill(self) -> None:
        """Remove the last message and keep its text as the beginning of the reply.

        Raises RequestInvalid if it is anything but a text of the assistant.
        """
        if not self.ends_with_assistant_text:
            raise RequestInvalid("messages: expected a text of the assistant as the last message, to be continued")
        self.prefill = self.messages.pop().text

    def parse_content(self, content: Any) -> str | tuple[ContentPart, ...]:
        """Parse content to a text, or to parts if some are images."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = self.parse_parts(content)
        if any(isinstance(part, MediaPart) for part in parts):
            return parts
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def parse_parts(self, content: Any) -> tuple[ContentPart, ...]:
        """Parse a list of parts, or one image. Raises RequestInvalid or ImageInvalid, which name the part."""
        if isinstance(content, Media):
            content = [content]
        if not is_list(content) and not is_tuple(content):
            raise RequestInvalid(f"content: expected a text or a list of parts, found {describe_value(content)}")
        parts: list[ContentPart] = []
        for index, entry in enumerate(content):
            try:
                parts.append(self.parse_part(entry))
            except (RequestInvalid, ImageInvalid) as error:
                raise type(error)(f"content[{index}]: {error.message}") from error
        return tuple(parts)

    def parse_part(self, entry: Any) -> ContentPart:
        """Parse one part of a content: a text or an image."""
        if isinstance(entry, TextPart | MediaPart):
            return entry
        if isinstance(entry, str):
            return TextPart(entry)
        if isinstance(entry, Media):
            return self.add_media(read_image(entry, self.read_url))
        part: Mapping[str, Any] = cast(Mapping[str, Any], entry) if isinstance(entry, Mapping) else {}
        if part.get("type") in TEXT_TYPES and ("text" in part or "refusal" in part):
            return TextPart(str(part.get("text") or part.get("refusal") or ""))
        if part.get("type") in IMAGE_PART_TYPES and (value := find_image_value(part)) is not None:
            return self.add_media(read_image(value, self.read_url))
        text_part = "{'type': 'text', 'text': TEXT}"
        raise RequestInvalid(
            f"expected a part such as {text_part} or {IMAGE_PART_EXAMPLE}, found {describe_value(entry)}"
        )

    def add_media(self, media: Media) -> MediaPart:
        """Add an image and return the part that refers to it."""
        self.media[media.hash] = media
        return MediaPart(media.hash)

    def build_request(
        self,
        body: Mapping[str, Any],
        tools: Any,
        parse_tool: ToolEntryParser,
        *,
        response_format: tuple[str, Any],
        **field_names: str,
    ) -> ModelRequest:
        """Build the request of a body whose messages were added; `tool_choice` may disable or require the tools.

        `response_format` is the dialect's name of this field and its value; `field_names` are its names of the sampling
        parameters `stop` and `max_tokens`. Raises RequestInvalid.
        """
        allows_calls = not forbids_calls(body.get("tool_choice"))
        parsed = map(parse_tool, (tools or ()) if allows_calls else ())
        parsed_tools = tuple(tool for tool in parsed if tool is not None)
        format_field, format_value = response_format
        constraint = parse_constraint(body, parsed_tools, response_format=format_value, format_field=format_field)
        if constraint is not None and self.prefill:
            raise RequestInvalid(f"{format_field} and tool_choice: not possible if the client begins the reply")
        fields = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")} | field_names
        return ModelRequest(
            messages=tuple(self.messages),
            tools=parsed_tools,
            model=str(body.get("model") or ""),
            sampling_overrides={name: body[key] for name, key in fields.items() if body.get(key) is not None},
            media=self.media,
            prefill=self.prefill,
            constraint=constraint,
            allows_calls=allows_calls,
        )


def remove_prefill(message: Message, prefill: str) -> Message:
    """Return a reply without the beginning that the client has written."""
    if not prefill or not message.text.startswith(prefill):
        return message
    return replace(message, content=message.text.removeprefix(prefill))


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
