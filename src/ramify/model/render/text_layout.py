"""The rendered text of a conversation, with the extent of every message in it.

The template alone determines the text; sentinels and separators only assign its characters to messages. So a template
that they cannot handle (one that depends on message texts, or numbers its turns) still gives the right tokens, only
with coarser spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import TemplateRefused
from ramify.model.render.outline import MessageKind
from ramify.model.render.sentinels import Sentinels, TextSlot, align_slots, common_text_prefix_length, message_extents
from ramify.model.render.separators import END_OF_CONVERSATION, GENERATION_PROMPT, Separator, SeparatorFinder
from ramify.model.render.template_adapter import TemplateAdapter
from ramify.trace import Message

MAX_CACHED_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class MessageExtent:
    """The characters of a message: its body, and the end of the template text that closes it.

    The body is what the message itself says: reasoning, content and tool calls.
    """

    body: tuple[int, int]
    stop: int


@dataclass(frozen=True, slots=True)
class TextLayout:
    """The text of a conversation, and the extents of the requested messages."""

    text: str
    extents: tuple[MessageExtent, ...]
    is_coarse: bool = False  # only the ends of messages are known, not their bodies


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """Computes the extents of messages; `text_extents` is the range of the texts of each message, by its index."""

    separators: SeparatorFinder
    text: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    text_extents: Mapping[int, tuple[int, int]]

    def extents(self, first: int) -> tuple[MessageExtent, ...]:
        """Return the extents of `messages[first:]`."""
        extents: list[MessageExtent] = []
        earlier_stops = (stop for index, (_, stop) in self.text_extents.items() if index < first)
        previous_stop = max(earlier_stops, default=0)
        for index in range(first, len(self.messages)):
            extents.append(self._extent(index, previous_stop))
            previous_stop = extents[-1].stop
        return tuple(extents)

    def _extent(self, index: int, previous_stop: int) -> MessageExtent:
        separator = self._separator_after(index)
        if separator is None:
            # Without a separator only the text is known; a message without text is not shown, or in another message.
            start, end = self.text_extents.get(index, (previous_stop, previous_stop))
            return MessageExtent((start, end), end)
        end = max(previous_stop, self._body_end(index, separator, previous_stop))
        start = min(max(previous_stop, self._body_start(index, previous_stop)), end)
        return MessageExtent((start, end), self._message_end(index, separator, end))

    def _separator_after(self, index: int) -> Separator | None:
        if index + 1 < len(self.messages):
            next_kind = MessageKind.from_message(self.messages[index + 1])
        else:
            next_kind = GENERATION_PROMPT if self.add_generation_prompt else END_OF_CONVERSATION
        message = self.messages[index]
        kind = MessageKind.from_message(message)
        return self.separators.find(kind, next_kind, self.tools, call_id=message.tool_call_id)

    def _next_text_start(self, index: int, default: int) -> int:
        """Return the start of the next message's text, or the end of the whole text."""
        is_last = index + 1 == len(self.messages)
        return len(self.text) if is_last else self.text_extents.get(index + 1, (default, default))[0]

    def _body_end(self, index: int, separator: Separator, previous_stop: int) -> int:
        """Return the end of the body: the end of its text or, after tool calls, the start of the separator."""
        message = self.messages[index]
        _, text_stop = self.text_extents.get(index, (previous_stop, previous_stop))
        if index in self.text_extents and not message.tool_calls and (message.text or message.role != "assistant"):
            return text_stop + common_text_prefix_length(self.text, separator.body_tail, text_stop)
        next_start = self._next_text_start(index, text_stop)
        end = next_start - len(separator.text)
        if end >= text_stop and self.text.startswith(separator.text, end):
            return end
        if message.role != "assistant":
            return text_stop
        return self.separators.find_stop_token(self.text, text_stop, max(text_stop, next_start))

    def _message_end(self, index: int, separator: Separator, body_end: int) -> int:
        """Return the end of the message: after its closing text or, if that varies, where the next message opens."""
        if self.text.startswith(separator.closing, body_end):
            return body_end + len(separator.closing)
        opening_start = self._next_text_start(index, body_end) - len(separator.opening)
        if opening_start >= body_end and self.text.startswith(separator.opening, opening_start):
            return opening_start
        return body_end

    def _body_start(self, index: int, previous_stop: int) -> int:
        """Return the start of the body: its text or, before reasoning and calls, the end of the opening text."""
        message = self.messages[index]
        text_start, _ = self.text_extents.get(index, (len(self.text), 0))
        if index == 0 or (index in self.text_extents and message.reasoning is None and not message.tool_calls):
            return text_start
        kind = GENERATION_PROMPT if message.role == "assistant" else MessageKind.from_message(message)
        separator = self.separators.find(MessageKind.from_message(self.messages[index - 1]), kind, self.tools)
        opening = separator.opening if separator is not None else ""
        return min(text_start, previous_stop + common_text_prefix_length(self.text, opening, previous_stop))


class SentinelText(NamedTuple):
    """The text that a template writes for a conversation of sentinels, and their slots in it."""

    tools: Sequence[Mapping[str, Any]]
    text: str
    slots: list[TextSlot]


class TextLayoutBuilder:
    """Builds text layouts with one template."""

    def __init__(self, adapter: TemplateAdapter, separators: SeparatorFinder) -> None:
        self._adapter = adapter
        self._separators = separators
        self._sentinel_texts: BoundedCache[tuple[tuple[Message, ...], bool], SentinelText]
        self._sentinel_texts = BoundedCache(MAX_CACHED_LAYOUTS)

    def build(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        first: int = 0,
    ) -> TextLayout:
        """Return the text of the conversation and the extents of `messages[first:]`."""
        text = self._adapter.render(messages, tools, add_generation_prompt)
        sentinels = Sentinels(avoid=text)
        for skip_sensitive in (False, True):
            substituted = sentinels.substitute(messages, skip_sensitive=skip_sensitive)
            rendered = self._render_sentinels(sentinels, substituted, tools, add_generation_prompt)
            slots = align_slots(text, rendered.text, rendered.slots, messages)
            if slots is not None:
                extents = message_extents(slots)
                locator = MessageLocator(self._separators, text, messages, tools, add_generation_prompt, extents)
                return TextLayout(text, locator.extents(first))
        return TextLayout(text, self._extents_by_prefix(text, messages, tools)[first:], is_coarse=True)

    def _render_sentinels(
        self,
        sentinels: Sentinels,
        substituted: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> SentinelText:
        """Render a conversation of sentinels. Conversations that differ only in texts share it, so it is cached."""
        key = (tuple(substituted), add_generation_prompt)
        cached = self._sentinel_texts.get(key)
        if cached is None or cached.tools != tools:
            text = self._adapter.render(substituted, tools, add_generation_prompt)
            cached = SentinelText(tools, text, sentinels.find_slots(text))
            self._sentinel_texts.put(key, cached)
        return cached

    def _extents_by_prefix(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[MessageExtent, ...]:
        """Return the extents found by rendering every prefix, with all text of a message as its body."""
        extents: list[MessageExtent] = []
        previous_stop = 0
        for count in range(1, len(messages) + 1):
            try:
                prefix = self._adapter.render(messages[:count], tools)
            except TemplateRefused:
                prefix = ""
            stop = max(previous_stop, common_text_prefix_length(text, prefix))
            extents.append(MessageExtent((previous_stop, stop), stop))
            previous_stop = stop
        return tuple(extents)
