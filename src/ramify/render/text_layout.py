"""A conversation as text, with the characters of every message.

The template decides the text; marks and seams only say whose it is. So a template that defies them (one that looks at
what a message says, or numbers its turns) still gives the right tokens, only with coarser spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ramify.errors import TemplateRefused
from ramify.render.bounded_cache import BoundedCache
from ramify.render.outline import MessageKind
from ramify.render.sentinels import Sentinels, TextSlot, align_slots, common_text_prefix_length, message_extents
from ramify.render.separators import END_OF_CONVERSATION, GENERATION_PROMPT, Separator, SeparatorFinder
from ramify.render.template_adapter import TemplateAdapter
from ramify.trace import Message

MAX_CACHED_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class MessageExtent:
    """The characters of a message: its body, and where it ends with its scaffold."""

    body: tuple[int, int]
    stop: int


@dataclass(frozen=True, slots=True)
class TextLayout:
    """The text of a conversation, and the places of the messages that were asked for."""

    text: str
    extents: tuple[MessageExtent, ...]
    is_coarse: bool = False  # bodies are not known, only where messages end


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """A conversation to lay out: `known` says from where to where the texts of a message stand."""

    separators: SeparatorFinder
    text: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    text_extents: Mapping[int, tuple[int, int]]

    def extents(self, first: int) -> tuple[MessageExtent, ...]:
        places: list[MessageExtent] = []
        before = max(
            (self.text_extents[number][1] for number in range(first) if number in self.text_extents), default=0
        )
        for number in range(first, len(self.messages)):
            places.append(self._extent(number, before))
            before = places[-1].stop
        return tuple(places)

    def _extent(self, index: int, previous_stop: int) -> MessageExtent:
        seam = self._separator_after(index)
        if seam is None:
            # Without a seam there is only the text; without a text the template shows nothing, or in another message.
            start, end = self.text_extents.get(index, (previous_stop, previous_stop))
            return MessageExtent((start, end), end)
        end = max(previous_stop, self._body_end(index, seam, previous_stop))
        start = min(max(previous_stop, self._body_start(index, previous_stop)), end)
        return MessageExtent((start, end), self._message_end(index, seam, end))

    def _separator_after(self, index: int) -> Separator | None:
        if index + 1 < len(self.messages):
            following = MessageKind.from_message(self.messages[index + 1])
        else:
            following = GENERATION_PROMPT if self.add_generation_prompt else END_OF_CONVERSATION
        message = self.messages[index]
        return self.separators.find(
            MessageKind.from_message(message), following, self.tools, call_id=message.tool_call_id
        )

    def _next_text_start(self, index: int, default: int) -> int:
        """Where the text of the next message begins, or all text ends."""
        last = index + 1 == len(self.messages)
        return len(self.text) if last else self.text_extents.get(index + 1, (default, default))[0]

    def _body_end(self, index: int, separator: Separator, previous_stop: int) -> int:
        """Where the body ends: behind its text or, after tool calls, where the seam to the next message begins."""
        message = self.messages[index]
        _, spoken = self.text_extents.get(index, (previous_stop, previous_stop))
        if index in self.text_extents and not message.tool_calls and (message.text or message.role != "assistant"):
            return spoken + common_text_prefix_length(self.text, separator.body_tail, spoken)
        following = self._next_text_start(index, spoken)
        end = following - len(separator.text)
        if end >= spoken and self.text.startswith(separator.text, end):
            return end
        if message.role != "assistant":
            return spoken
        return self.separators.find_stop_token(self.text, spoken, max(spoken, following))

    def _message_end(self, index: int, separator: Separator, body_end: int) -> int:
        """Where the message ends: behind its close or, if that is never the same, where the next one opens."""
        if self.text.startswith(separator.closing, body_end):
            return body_end + len(separator.closing)
        opens = self._next_text_start(index, body_end) - len(separator.opening)
        return opens if opens >= body_end and self.text.startswith(separator.opening, opens) else body_end

    def _body_start(self, index: int, previous_stop: int) -> int:
        """Where the body begins: at its text or, before reasoning and calls, behind what opens the message."""
        message = self.messages[index]
        spoken, _ = self.text_extents.get(index, (len(self.text), 0))
        if index == 0 or (index in self.text_extents and message.reasoning is None and not message.tool_calls):
            return spoken
        kind = GENERATION_PROMPT if message.role == "assistant" else MessageKind.from_message(message)
        lead = self.separators.find(MessageKind.from_message(self.messages[index - 1]), kind, self.tools)
        opening = lead.opening if lead is not None else ""
        return min(spoken, previous_stop + common_text_prefix_length(self.text, opening, previous_stop))


class SentinelText(NamedTuple):
    """What a template writes for a conversation with marks, and where they stand."""

    tools: Sequence[Mapping[str, Any]]
    text: str
    slots: list[TextSlot]


class TextLayoutBuilder:
    """Lays out conversations with one template."""

    def __init__(self, adapter: TemplateAdapter, separators: SeparatorFinder) -> None:
        self._adapter = adapter
        self._separators = separators
        self._sentinel_texts: BoundedCache[tuple[tuple[Message, ...], bool], SentinelText] = BoundedCache(
            MAX_CACHED_LAYOUTS
        )

    def build(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        first: int = 0,
    ) -> TextLayout:
        """The text, and the places of `messages[first:]`."""
        text = self._adapter.render(messages, tools, add_generation_prompt)
        marks = Sentinels(avoid=text)
        for shy in (False, True):
            scaffold = self._render_sentinels(
                marks, marks.substitute(messages, skip_sensitive=shy), tools, add_generation_prompt
            )
            slots = align_slots(text, scaffold.text, scaffold.slots, messages)
            if slots is not None:
                page = MessageLocator(
                    self._separators, text, messages, tools, add_generation_prompt, message_extents(slots)
                )
                return TextLayout(text, page.extents(first))
        return TextLayout(text, self._extents_by_prefix(text, messages, tools)[first:], is_coarse=True)

    def _render_sentinels(
        self,
        sentinels: Sentinels,
        substituted: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> SentinelText:
        """Conversations that differ only in what is said have the same, so the latest are remembered."""
        key = (tuple(substituted), add_generation_prompt)
        known = self._sentinel_texts.get(key)
        if known is None or known.tools != tools:
            text = self._adapter.render(substituted, tools, add_generation_prompt)
            known = SentinelText(tools, text, sentinels.find_slots(text))
            self._sentinel_texts.put(key, known)
        return known

    def _extents_by_prefix(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[MessageExtent, ...]:
        """Places found by rendering every prefix, all of a message counted as its body."""
        places: list[MessageExtent] = []
        before = 0
        for number in range(1, len(messages) + 1):
            try:
                prefix = self._adapter.render(messages[:number], tools)
            except TemplateRefused:
                prefix = ""
            stop = max(before, common_text_prefix_length(text, prefix))
            places.append(MessageExtent((before, stop), stop))
            before = stop
        return tuple(places)
