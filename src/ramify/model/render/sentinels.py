"""Locate each message in rendered text, by rendering the same conversation with sentinel words instead of texts.

The sentinel text shows the template's own text and the slot of every message text. Aligning it with the real text gives
the exact positions, in two renderings for any number of messages. Searching for the texts themselves would fail: a
user may write "user", and a template may trim, escape, move or omit a text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ramify.model.render.prompt_images import content_parts, has_images
from ramify.trace import Message, TextPart
from ramify.trace.message import Part

CONTENT, REASONING, ARGUMENTS = "c", "r", "a"


class TextSlot(Struct, frozen=True):
    """The characters [start, stop) of one text of a message; `part` is its index in a content of several parts."""

    message_index: int
    field: str
    start: int
    stop: int
    part: int | None = None

    def read_text(self, messages: Sequence[Message]) -> str:
        """Return the text of the message that belongs into the slot."""
        message = messages[self.message_index]
        if self.field != CONTENT:
            return message.reasoning or ""
        if self.part is None:
            return message.text
        part = content_parts(message)[self.part]
        return part.text if isinstance(part, TextPart) else ""


class Sentinels:
    """Words that replace the texts of a conversation and do not occur in the text `avoid`."""

    def __init__(self, avoid: str = "") -> None:
        self._prefix = "zq"
        while self._prefix in avoid:
            self._prefix += "q"
        self._pattern = re.compile(rf"{self._prefix}(\d+)([cra])(\d*)z")

    def substitute(
        self, messages: Sequence[Message], *, include_arguments: bool = False, skip_sensitive: bool = False
    ) -> list[Message]:
        """Return the conversation with a sentinel for every text; an empty text of an assistant stays empty.

        Templates that depend on texts look for tags, or for an empty text. With `skip_sensitive`, messages with a tag
        or without text are left unchanged.
        """
        return [
            message
            if skip_sensitive and (not message.text or "<" in message.text)
            else self._substitute_message(index, message, include_arguments)
            for index, message in enumerate(messages)
        ]

    def find_slots(self, text: str) -> list[TextSlot]:
        """Return the slots of the sentinels in a text, in order."""
        matches = self._pattern.finditer(text)
        return [
            TextSlot(int(match[1]), match[2], match.start(), match.end(), int(match[3]) if match[3] else None)
            for match in matches
        ]

    def redact(self, text: str) -> str:
        """Return the text with an ellipsis for every sentinel, for error messages."""
        return self._pattern.sub("…", text)

    def _substitute_message(self, index: int, message: Message, include_arguments: bool) -> Message:
        content: str | tuple[Part, ...] = ""
        if has_images(message):
            content = tuple(
                TextPart(self._sentinel(index, f"{CONTENT}{number}")) if isinstance(part, TextPart) else part
                for number, part in enumerate(content_parts(message))
            )
        elif message.text or message.role != "assistant":
            content = self._sentinel(index, CONTENT)
        reasoning = self._sentinel(index, REASONING) if message.reasoning else message.reasoning
        calls = message.tool_calls
        if include_arguments:
            value = json.dumps({"q": self._sentinel(index, ARGUMENTS)})
            calls = tuple(replace(call, arguments=value) for call in calls)
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls)

    def _sentinel(self, index: int, field: str) -> str:
        return f"{self._prefix}{index}{field}z"


def align_slots(
    real: str, sentinel_text: str, slots: Sequence[TextSlot], messages: Sequence[Message]
) -> list[TextSlot] | None:
    """Return the slots of the sentinel text at their positions in the real text; None if the template text differs."""
    aligned: list[TextSlot] = []
    sentinel_position = position = 0
    for index, slot in enumerate(slots):
        template_text = sentinel_text[sentinel_position : slot.start]
        if not real.startswith(template_text, position):
            return None
        position += len(template_text)
        is_last = index + 1 == len(slots)
        next_text = sentinel_text[slot.stop :] if is_last else sentinel_text[slot.stop : slots[index + 1].start]
        length = _rendered_length(real, position, slot.read_text(messages), next_text, is_last)
        if length is None:
            return None
        aligned.append(TextSlot(slot.message_index, slot.field, position, position + length, slot.part))
        sentinel_position, position = slot.stop, position + length
    return aligned if real[position:] == sentinel_text[sentinel_position:] else None


def common_text_prefix_length(text: str, other: str, start: int = 0) -> int:
    """Return the length of the longest prefix of `other` that `text` has at `start`."""
    low, high = 0, len(other)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle], start):
            low = middle
        else:
            high = middle - 1
    return low


def message_extents(slots: Sequence[TextSlot]) -> Mapping[int, tuple[int, int]]:
    """Return the range of the texts of each message, by its index.

    A text that the template moved after a later message (a system prompt in the last question) is not counted.
    """
    extents: dict[int, tuple[int, int]] = {}
    latest = -1
    for slot in slots:
        if slot.message_index >= latest:
            latest = slot.message_index
            start, _ = extents.get(latest, (slot.start, slot.stop))
            extents[latest] = (start, slot.stop)
    return extents


def _rendered_length(real: str, position: int, text: str, following: str, is_last: bool) -> int | None:
    """Return the length of a text as rendered at `position`, given the template text after it; None if not found."""
    for variant in _text_variants(text):
        stop = position + len(variant)
        fits = real.startswith(variant, position) and real.startswith(following, stop)
        if fits and (not is_last or stop + len(following) == len(real)):
            return len(variant)
    stop = len(real) - len(following) if is_last else real.find(following, position) if following else -1
    return stop - position if stop >= position and real.startswith(following, stop) else None


def _text_variants(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text."""
    yield text
    yield text.strip()
    yield text.strip("\n")
    yield text.lstrip()
    yield text.rstrip()
    yield text.lstrip("\n")
    yield text.rstrip("\n")
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text.strip(), ensure_ascii=False)[1:-1]
