"""Our messages in the form a given template reads, and the text it writes for them.

Templates agree on `role` and `content` and on little else. Where a template looks for reasoning, whether it wants a
content of parts, whether it insists on nine-letter call ids: that is found out by asking it. Render a message with a
word in the place in question and see whether the word appears.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ramify.errors import TemplateRefused
from ramify.render.outline import FILLER
from ramify.render.template import ChatTemplate
from ramify.trace import MediaPart, Message, ToolCall

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
IN_CONTENT = "content"
WORD = "zqprobeqz"
ANY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": {"type": "object", "properties": {}}},
}


class ReasoningTags(NamedTuple):
    """How reasoning begins and ends."""

    start: str
    stop: str


KNOWN_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


class Writer:
    """One model's template, addressed in our messages."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.tags = next((tags for tags in KNOWN_TAGS if tags.stop in template), KNOWN_TAGS[0])

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = False) -> str:
        return self._template.text(self._plain(messages), tools, generate)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells the model about the tools it may use."""
        return self._shows({"role": "user", "content": self._content(FILLER)}, tools=[ANY_TOOL])

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key under which the template looks for reasoning: one of its own, the content, or none at all."""
        question = {"role": "user", "content": self._content(FILLER)}
        for key in REASONING_KEYS:
            reply = {"role": "assistant", "content": self._content(FILLER), key: WORD}
            if key in self._template and self._shows(question, reply):
                return key
        inline = self._content(_inline(Message("assistant", FILLER, WORD), self.tags))
        return IN_CONTENT if self._shows(question, {"role": "assistant", "content": inline}) else None

    def shown_id(self, id: str) -> str:
        """A call id in a form that the template accepts."""
        if not self._short_ids or (len(id) == 9 and id.isalnum()):
            return id
        return hashlib.sha256(id.encode("utf-8", "backslashreplace")).hexdigest()[:9]

    @cached_property
    def _short_ids(self) -> bool:
        """Whether call ids of another form than nine letters and digits are refused, as Mistral's templates do."""
        return self._takes_id("call00000") and not self._takes_id("call_0123456789")

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template wants a content of parts, as those of models that see images do."""
        parts = [{"type": "text", "text": WORD}]
        as_text, as_parts = (self._shows({"role": "user", "content": content}) for content in (WORD, parts))
        return as_parts and not as_text

    def _takes_id(self, id: str) -> bool:
        call: dict[str, Any] = {"id": id, "type": "function", "function": {"name": FILLER, "arguments": {}}}
        return self._shows(
            {"role": "user", "content": self._content(WORD)},
            {"role": "assistant", "content": self._content(""), "tool_calls": [call]},
            {"role": "tool", "content": self._content(FILLER), "tool_call_id": id},
            tools=[ANY_TOOL],
        )

    def _shows(self, *conversation: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template takes this conversation and shows the word in it."""
        try:
            return WORD in self._template.text(list(conversation), tools, False)
        except TemplateRefused:
            return False

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self._in_parts else text

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        names: dict[str, str] = {}
        plain: list[dict[str, Any]] = []
        for message in messages:
            names |= {call.id: call.name for call in message.tool_calls}
            plain.append(self._plain_message(message, names))
        return plain

    def _plain_message(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        inline = message.reasoning is not None and self.reasoning_key == IN_CONTENT
        content = _inline(message, self.tags) if inline else text_of(message)
        plain: dict[str, Any] = {"role": message.role, "content": self._content(content)}
        if message.reasoning is not None and self.reasoning_key and not inline:
            plain[self.reasoning_key] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [self._plain_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = self.shown_id(message.tool_call_id)
            if message.tool_call_id in names:
                plain["name"] = names[message.tool_call_id]
        return plain

    def _plain_call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": _arguments(call.arguments)}
        return {"id": self.shown_id(call.id), "type": "function", "function": function}


def text_of(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, MediaPart) for part in message.content):
        raise TemplateRefused("a message holds media, which a chat template cannot show; use a text-only task")
    return message.text


def _inline(message: Message, tags: ReasoningTags) -> str:
    return f"{tags.start}\n{message.reasoning}\n{tags.stop}\n\n{message.text}"


def _arguments(text: str) -> Any:
    """The table of arguments, as templates want it; text that is none goes through as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
