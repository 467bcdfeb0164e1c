"""Convert messages to the form that a given template expects, and render them.

Templates agree on `role` and `content` and on little else. The key of the reasoning, content as a list of parts, call
ids of nine characters: such requirements are detected by rendering a message with a probe text in the place in
question. If the probe text appears, the template supports it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ramify.core.errors import TemplateRefused
from ramify.model.render.outline import CALL_ID, FILLER_TEXT
from ramify.model.render.prompt_images import content_parts, has_images
from ramify.model.render.template import ChatTemplate
from ramify.trace import Message, TextPart, ToolCall

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
REASONING_IN_CONTENT = "content"
PROBE_TEXT = "zqprobeqz"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": PROBE_TEXT, "description": PROBE_TEXT, "parameters": {"type": "object", "properties": {}}},
}


class ReasoningTags(NamedTuple):
    """The tags around reasoning."""

    start: str
    stop: str


KNOWN_REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


class TemplateAdapter:
    """The chat template of one model, rendered from `Message` objects."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.reasoning_tags = next(
            (tags for tags in KNOWN_REASONING_TAGS if tags.stop in template), KNOWN_REASONING_TAGS[0]
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = False
    ) -> str:
        """Render messages with the template. Raises TemplateRefused if it fails."""
        return self._template.render(self._to_dicts(messages), tools, add_generation_prompt)

    @cached_property
    def has_tool_support(self) -> bool:
        """Whether the template shows tools to the model."""
        return self._renders_probe({"role": "user", "content": self._wrap_content(FILLER_TEXT)}, tools=[PROBE_TOOL])

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key from which the template reads reasoning: one of `REASONING_KEYS`, the content, or None."""
        question = {"role": "user", "content": self._wrap_content(FILLER_TEXT)}
        for key in REASONING_KEYS:
            reply = {"role": "assistant", "content": self._wrap_content(FILLER_TEXT), key: PROBE_TEXT}
            if key in self._template and self._renders_probe(question, reply):
                return key
        inline = self._wrap_content(
            _inline_reasoning(Message("assistant", FILLER_TEXT, PROBE_TEXT), self.reasoning_tags)
        )
        return REASONING_IN_CONTENT if self._renders_probe(question, {"role": "assistant", "content": inline}) else None

    def writes_tool_images(self, marker: str) -> bool:
        """Return whether the template writes the images of tool results, given what it writes for an image."""
        call: dict[str, Any] = {"id": CALL_ID, "type": "function", "function": {"name": FILLER_TEXT, "arguments": {}}}
        question = {"role": "user", "content": self._wrap_content(FILLER_TEXT)}
        reply = {"role": "assistant", "content": self._wrap_content(""), "tool_calls": [call]}
        result = {"role": "tool", "content": [{"type": "image"}], "tool_call_id": CALL_ID}
        try:
            return self._template.render([question, reply, result], [], False).count(marker) == 1
        except TemplateRefused:
            return False

    def to_template_id(self, call_id: str) -> str:
        """Return a call id in a form that the template accepts."""
        if not self._requires_short_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "backslashreplace")).hexdigest()[:9]

    @cached_property
    def _requires_short_ids(self) -> bool:
        """Whether the template accepts only call ids of nine letters and digits, as Mistral's templates do."""
        return self._accepts_id("call00000") and not self._accepts_id("call_0123456789")

    @cached_property
    def _requires_content_parts(self) -> bool:
        """Whether the template requires content as a list of parts, as templates of vision models do."""
        parts = [{"type": "text", "text": PROBE_TEXT}]
        as_text, as_parts = (
            self._renders_probe({"role": "user", "content": content}) for content in (PROBE_TEXT, parts)
        )
        return as_parts and not as_text

    def _accepts_id(self, call_id: str) -> bool:
        call: dict[str, Any] = {"id": call_id, "type": "function", "function": {"name": FILLER_TEXT, "arguments": {}}}
        return self._renders_probe(
            {"role": "user", "content": self._wrap_content(PROBE_TEXT)},
            {"role": "assistant", "content": self._wrap_content(""), "tool_calls": [call]},
            {"role": "tool", "content": self._wrap_content(FILLER_TEXT), "tool_call_id": call_id},
            tools=[PROBE_TOOL],
        )

    def _renders_probe(self, *conversation: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Return whether the template renders this conversation with the probe text in it."""
        try:
            return PROBE_TEXT in self._template.render(list(conversation), tools, False)
        except TemplateRefused:
            return False

    def _wrap_content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self._requires_content_parts else text

    def _to_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        names: dict[str, str] = {}
        dicts: list[dict[str, Any]] = []
        for message in messages:
            names |= {call.id: call.name for call in message.tool_calls}
            dicts.append(self._message_dict(message, names))
        return dicts

    def _message_dict(self, message: Message, tool_names: Mapping[str, str]) -> dict[str, Any]:
        is_inline = message.reasoning is not None and self.reasoning_key == REASONING_IN_CONTENT
        text = _inline_reasoning(message, self.reasoning_tags) if is_inline else message.text
        content = _part_dicts(message) if has_images(message) else self._wrap_content(text)
        message_dict: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning is not None and self.reasoning_key and not is_inline:
            message_dict[self.reasoning_key] = message.reasoning
        if message.tool_calls:
            message_dict["tool_calls"] = [self._call_dict(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            message_dict["tool_call_id"] = self.to_template_id(message.tool_call_id)
            if message.tool_call_id in tool_names:
                message_dict["name"] = tool_names[message.tool_call_id]
        return message_dict

    def _call_dict(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": _parse_arguments(call.arguments)}
        return {"id": self.to_template_id(call.id), "type": "function", "function": function}


def _part_dicts(message: Message) -> list[dict[str, str]]:
    """Return the content of a message with images, in the form that templates of vision models expect."""
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in content_parts(message)
    ]


def _inline_reasoning(message: Message, reasoning_tags: ReasoningTags) -> str:
    return f"{reasoning_tags.start}\n{message.reasoning}\n{reasoning_tags.stop}\n\n{message.text}"


def _parse_arguments(text: str) -> Any:
    """Return the parsed arguments, as templates expect them; text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
