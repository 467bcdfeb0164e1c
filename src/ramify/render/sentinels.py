"""Finding each message in the text a template wrote, by rendering the same conversation with marks instead of texts.

The marked text shows the scaffold and where every text goes; laying it over the real text gives the real positions,
exactly and in two renderings however many messages there are. Searching for the texts themselves would not do: a user
may say "user", and a template may trim, escape, move or leave out what a message says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ramify.trace import Message

CONTENT, REASONING, ARGUMENTS = "c", "r", "a"


@dataclass(frozen=True, slots=True)
class TextSlot:
    """Where one text of a message stands: characters [start, stop)."""

    message_index: int
    field: str
    start: int
    stop: int


class Sentinels:
    """Words that stand for the texts of a conversation and occur in none of them."""

    def __init__(self, avoid: str = "") -> None:
        self._prefix = "zq"
        while self._prefix in avoid:
            self._prefix += "q"
        self._pattern = re.compile(rf"{self._prefix}(\d+)([cra])z")

    def substitute(
        self, messages: Sequence[Message], *, include_arguments: bool = False, skip_sensitive: bool = False
    ) -> list[Message]:
        """The conversation with a mark for every text; what an assistant leaves empty stays empty.

        Templates that look at what messages say look for tags, or whether there is anything. With `shy`, messages that
        have a tag or no text are left as they are.
        """
        return [
            message
            if skip_sensitive and (not message.text or "<" in message.text)
            else self._substitute_message(number, message, include_arguments)
            for number, message in enumerate(messages)
        ]

    def find_slots(self, text: str) -> list[TextSlot]:
        """The marks in a text, in order."""
        found = self._pattern.finditer(text)
        return [TextSlot(int(match[1]), match[2], match.start(), match.end()) for match in found]

    def redact(self, text: str) -> str:
        """The text for people: an ellipsis for every mark."""
        return self._pattern.sub("…", text)

    def _substitute_message(self, index: int, message: Message, include_arguments: bool) -> Message:
        content = self._sentinel(index, CONTENT) if message.text or message.role != "assistant" else ""
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
    """The slots of the marked text, moved to where they are in the real one; None where the two differ in scaffold."""
    placed: list[TextSlot] = []
    behind = here = 0
    for number, slot in enumerate(slots):
        scaffold = sentinel_text[behind : slot.start]
        if not real.startswith(scaffold, here):
            return None
        here += len(scaffold)
        last = number + 1 == len(slots)
        following = sentinel_text[slot.stop :] if last else sentinel_text[slot.stop : slots[number + 1].start]
        shown = _rendered_length(real, here, _field_text(messages[slot.message_index], slot.field), following, last)
        if shown is None:
            return None
        placed.append(TextSlot(slot.message_index, slot.field, here, here + shown))
        behind, here = slot.stop, here + shown
    return placed if real[here:] == sentinel_text[behind:] else None


def common_text_prefix_length(text: str, other: str, start: int = 0) -> int:
    """How many characters of `other` the text shows from position `at` on."""
    low, high = 0, len(other)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle], start):
            low = middle
        else:
            high = middle - 1
    return low


def message_extents(slots: Sequence[TextSlot]) -> Mapping[int, tuple[int, int]]:
    """From where to where each message's texts stand, for messages in the order of the conversation.

    A text that a template moved behind a later message (a system prompt in the last question) is that one's scaffold.
    """
    found: dict[int, tuple[int, int]] = {}
    furthest = -1
    for slot in slots:
        if slot.message_index >= furthest:
            furthest = slot.message_index
            start, _ = found.get(furthest, (slot.start, slot.stop))
            found[furthest] = (start, slot.stop)
    return found


def _field_text(message: Message, field: str) -> str:
    return message.text if field == CONTENT else message.reasoning or ""


def _rendered_length(real: str, position: int, text: str, following: str, is_last: bool) -> int | None:
    """How long the text is as the template shows it, given the scaffold behind it."""
    for form in _text_variants(text):
        stop = position + len(form)
        fits = real.startswith(form, position) and real.startswith(following, stop)
        if fits and (not is_last or stop + len(following) == len(real)):
            return len(form)
    stop = len(real) - len(following) if is_last else real.find(following, position) if following else -1
    return stop - position if stop >= position and real.startswith(following, stop) else None


def _text_variants(text: str) -> Iterator[str]:
    """What templates make of a text."""
    yield text
    yield text.strip()
    yield text.strip("\n")
    yield text.lstrip()
    yield text.rstrip()
    yield text.lstrip("\n")
    yield text.rstrip("\n")
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text.strip(), ensure_ascii=False)[1:-1]
