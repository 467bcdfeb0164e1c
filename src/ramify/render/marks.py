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
class Slot:
    """Where one text of a message stands: characters [start, stop)."""

    message: int
    field: str
    start: int
    stop: int


class Marks:
    """Words that stand for the texts of a conversation and occur in none of them."""

    def __init__(self, avoid: str = "") -> None:
        self._stem = "zq"
        while self._stem in avoid:
            self._stem += "q"
        self._pattern = re.compile(rf"{self._stem}(\d+)([cra])z")

    def mark(self, messages: Sequence[Message], *, arguments: bool = False, shy: bool = False) -> list[Message]:
        """The conversation with a mark for every text; what an assistant leaves empty stays empty.

        Templates that look at what messages say look for tags, or whether there is anything. With `shy`, messages that
        have a tag or no text are left as they are.
        """
        return [
            message if shy and (not message.text or "<" in message.text) else self._marked(number, message, arguments)
            for number, message in enumerate(messages)
        ]

    def slots(self, text: str) -> list[Slot]:
        """The marks in a text, in order."""
        found = self._pattern.finditer(text)
        return [Slot(int(match[1]), match[2], match.start(), match.end()) for match in found]

    def hide(self, text: str) -> str:
        """The text for people: an ellipsis for every mark."""
        return self._pattern.sub("…", text)

    def _marked(self, number: int, message: Message, arguments: bool) -> Message:
        content = self._word(number, CONTENT) if message.text or message.role != "assistant" else ""
        reasoning = self._word(number, REASONING) if message.reasoning else message.reasoning
        calls = message.tool_calls
        if arguments:
            value = json.dumps({"q": self._word(number, ARGUMENTS)})
            calls = tuple(replace(call, arguments=value) for call in calls)
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls)

    def _word(self, number: int, field: str) -> str:
        return f"{self._stem}{number}{field}z"


def overlay(real: str, marked: str, slots: Sequence[Slot], messages: Sequence[Message]) -> list[Slot] | None:
    """The slots of the marked text, moved to where they are in the real one; None where the two differ in scaffold."""
    placed: list[Slot] = []
    behind = here = 0
    for number, slot in enumerate(slots):
        scaffold = marked[behind : slot.start]
        if not real.startswith(scaffold, here):
            return None
        here += len(scaffold)
        last = number + 1 == len(slots)
        following = marked[slot.stop :] if last else marked[slot.stop : slots[number + 1].start]
        shown = _shown(real, here, _said(messages[slot.message], slot.field), following, last)
        if shown is None:
            return None
        placed.append(Slot(slot.message, slot.field, here, here + shown))
        behind, here = slot.stop, here + shown
    return placed if real[here:] == marked[behind:] else None


def common_prefix(text: str, other: str, at: int = 0) -> int:
    """How many characters of `other` the text shows from position `at` on."""
    low, high = 0, len(other)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle], at):
            low = middle
        else:
            high = middle - 1
    return low


def extents(slots: Sequence[Slot]) -> Mapping[int, tuple[int, int]]:
    """From where to where each message's texts stand, for messages in the order of the conversation.

    A text that a template moved behind a later message (a system prompt in the last question) is that one's scaffold.
    """
    found: dict[int, tuple[int, int]] = {}
    furthest = -1
    for slot in slots:
        if slot.message >= furthest:
            furthest = slot.message
            start, _ = found.get(furthest, (slot.start, slot.stop))
            found[furthest] = (start, slot.stop)
    return found


def _said(message: Message, field: str) -> str:
    return message.text if field == CONTENT else message.reasoning or ""


def _shown(real: str, here: int, said: str, following: str, last: bool) -> int | None:
    """How long the text is as the template shows it, given the scaffold behind it."""
    for form in _forms(said):
        stop = here + len(form)
        fits = real.startswith(form, here) and real.startswith(following, stop)
        if fits and (not last or stop + len(following) == len(real)):
            return len(form)
    stop = len(real) - len(following) if last else real.find(following, here) if following else -1
    return stop - here if stop >= here and real.startswith(following, stop) else None


def _forms(said: str) -> Iterator[str]:
    """What templates make of a text."""
    yield said
    yield said.strip()
    yield said.strip("\n")
    yield said.lstrip()
    yield said.rstrip()
    yield said.lstrip("\n")
    yield said.rstrip("\n")
    yield json.dumps(said, ensure_ascii=False)[1:-1]
    yield json.dumps(said.strip(), ensure_ascii=False)[1:-1]
