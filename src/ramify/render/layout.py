"""A conversation as text, with the characters of every message.

The template decides the text; marks and seams only say whose it is. So a template that defies them (one that looks at
what a message says, or numbers its turns) still gives the right tokens, only with coarser spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ramify.errors import TemplateRefused
from ramify.render.marks import Marks, Slot, common_prefix, extents, overlay
from ramify.render.outline import Kind
from ramify.render.recent import RecentCache
from ramify.render.seams import GENERATE, NOTHING, Seam, Seams
from ramify.render.writer import Writer
from ramify.trace import Message

MOST_SCAFFOLDS = 64


@dataclass(frozen=True, slots=True)
class Place:
    """The characters of a message: its body, and where it ends with its scaffold."""

    body: tuple[int, int]
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The text of a conversation, and the places of the messages that were asked for."""

    text: str
    places: tuple[Place, ...]
    coarse: bool = False  # bodies are not known, only where messages end


@dataclass(frozen=True, slots=True)
class Page:
    """A conversation to lay out: `known` says from where to where the texts of a message stand."""

    seams: Seams
    text: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    generate: bool
    known: Mapping[int, tuple[int, int]]

    def places(self, first: int) -> tuple[Place, ...]:
        places: list[Place] = []
        before = max((self.known[number][1] for number in range(first) if number in self.known), default=0)
        for number in range(first, len(self.messages)):
            places.append(self._place(number, before))
            before = places[-1].stop
        return tuple(places)

    def _place(self, number: int, before: int) -> Place:
        seam = self._seam(number)
        if seam is None:
            # Without a seam there is only the text; without a text the template shows nothing, or in another message.
            start, end = self.known.get(number, (before, before))
            return Place((start, end), end)
        end = max(before, self._end(number, seam, before))
        start = min(max(before, self._start(number, before)), end)
        return Place((start, end), self._stop(number, seam, end))

    def _seam(self, number: int) -> Seam | None:
        if number + 1 < len(self.messages):
            following = Kind.of(self.messages[number + 1])
        else:
            following = GENERATE if self.generate else NOTHING
        message = self.messages[number]
        return self.seams.between(Kind.of(message), following, self.tools, call_id=message.tool_call_id)

    def _following(self, number: int, default: int) -> int:
        """Where the text of the next message begins, or all text ends."""
        last = number + 1 == len(self.messages)
        return len(self.text) if last else self.known.get(number + 1, (default, default))[0]

    def _end(self, number: int, seam: Seam, before: int) -> int:
        """Where the body ends: behind its text or, after tool calls, where the seam to the next message begins."""
        message = self.messages[number]
        _, spoken = self.known.get(number, (before, before))
        if number in self.known and not message.tool_calls and (message.text or message.role != "assistant"):
            return spoken + common_prefix(self.text, seam.rest, spoken)
        following = self._following(number, spoken)
        end = following - len(seam.outside)
        if end >= spoken and self.text.startswith(seam.outside, end):
            return end
        if message.role != "assistant":
            return spoken
        return self.seams.first_stop(self.text, spoken, max(spoken, following))

    def _stop(self, number: int, seam: Seam, end: int) -> int:
        """Where the message ends: behind its close or, if that is never the same, where the next one opens."""
        if self.text.startswith(seam.after, end):
            return end + len(seam.after)
        opens = self._following(number, end) - len(seam.opening)
        return opens if opens >= end and self.text.startswith(seam.opening, opens) else end

    def _start(self, number: int, before: int) -> int:
        """Where the body begins: at its text or, before reasoning and calls, behind what opens the message."""
        message = self.messages[number]
        spoken, _ = self.known.get(number, (len(self.text), 0))
        if number == 0 or (number in self.known and message.reasoning is None and not message.tool_calls):
            return spoken
        kind = GENERATE if message.role == "assistant" else Kind.of(message)
        lead = self.seams.between(Kind.of(self.messages[number - 1]), kind, self.tools)
        opening = lead.opening if lead is not None else ""
        return min(spoken, before + common_prefix(self.text, opening, before))


class Scaffold(NamedTuple):
    """What a template writes for a conversation with marks, and where they stand."""

    tools: Sequence[Mapping[str, Any]]
    text: str
    slots: list[Slot]


class Layouts:
    """Lays out conversations with one template."""

    def __init__(self, writer: Writer, seams: Seams) -> None:
        self._writer = writer
        self._seams = seams
        self._scaffolds: RecentCache[tuple[tuple[Message, ...], bool], Scaffold] = RecentCache(MOST_SCAFFOLDS)

    def lay_out(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generate: bool, first: int = 0
    ) -> Layout:
        """The text, and the places of `messages[first:]`."""
        text = self._writer.text(messages, tools, generate)
        marks = Marks(avoid=text)
        for shy in (False, True):
            scaffold = self._scaffold(marks, marks.mark(messages, shy=shy), tools, generate)
            slots = overlay(text, scaffold.text, scaffold.slots, messages)
            if slots is not None:
                page = Page(self._seams, text, messages, tools, generate, extents(slots))
                return Layout(text, page.places(first))
        return Layout(text, self._coarse(text, messages, tools)[first:], coarse=True)

    def _scaffold(
        self, marks: Marks, marked: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool
    ) -> Scaffold:
        """Conversations that differ only in what is said have the same, so the latest are remembered."""
        key = (tuple(marked), generate)
        known = self._scaffolds.get(key)
        if known is None or known.tools != tools:
            text = self._writer.text(marked, tools, generate)
            known = Scaffold(tools, text, marks.slots(text))
            self._scaffolds.put(key, known)
        return known

    def _coarse(self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Place, ...]:
        """Places found by rendering every prefix, all of a message counted as its body."""
        places: list[Place] = []
        before = 0
        for number in range(1, len(messages) + 1):
            try:
                prefix = self._writer.text(messages[:number], tools)
            except TemplateRefused:
                prefix = ""
            stop = max(before, common_prefix(text, prefix))
            places.append(Place((before, stop), stop))
            before = stop
        return tuple(places)
