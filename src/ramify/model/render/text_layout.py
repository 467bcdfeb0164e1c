"""The rendered text of a conversation, with the extent of every message in it.

The template alone determines the text; sentinels and separators only assign its characters to messages. So a template
that they cannot handle (one that depends on message texts, or numbers its turns) still gives the right tokens, only
with coarser spans.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import TemplateRefused
from ramify.model.render.outline import CALL_ID, FILLER_TEXT, SYSTEM_ROLES, MessageKind
from ramify.model.render.sentinels import Sentinels, TextSlot, align_slots, common_text_prefix_length, message_extents
from ramify.model.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.trace import Message

GENERATION_PROMPT = MessageKind("generation prompt")
END_OF_CONVERSATION = MessageKind("nothing")


class Separator(Struct, frozen=True):
    """The text between two message texts: `body_tail` + `closing` + `opening`.

        user       <|im_end|>\\n   <|im_start|>assistant\\n
                   closing         opening

    It is derived once per pair of message kinds. A message rendered last is followed only by its closing text; a
    message rendered before another one, by closing and opening text. The common prefix of both is the closing text. The
    same comparison finds the end of a reply with tool calls, whose text cannot be replaced by a sentinel.
    """

    body_tail: str  # part of the first message's body: the end of its tool calls
    closing: str
    opening: str

    @property
    def text(self) -> str:
        """The text between the two bodies."""
        return self.closing + self.opening


class SeparatorFinder:
    """Derives and caches the separators of one template."""

    def __init__(self, adapter: TemplateAdapter, stop_texts: Sequence[str]) -> None:
        self._adapter = adapter
        self._stop_texts = stop_texts
        self._cached_derive = lru_cache(maxsize=1024)(self._derive_with_probe_tool)

    def find(
        self,
        first: MessageKind,
        second: MessageKind,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        call_id: str | None = None,
    ) -> Separator | None:
        """Return the separator of two kinds, or None if it cannot be derived.

        `second` may be `GENERATION_PROMPT` or `END_OF_CONVERSATION`. `call_id` is the first message's, for a template
        that writes it after a tool's result.
        """
        separator = self._lookup(first, second, tools)
        if separator is None and first.reasoning is not None:
            # The template hides the reasoning of an earlier turn, but not the rest of the message.
            without_reasoning = first._replace(reasoning=None, has_content=first.has_content or not first.num_calls)
            separator = self._lookup(without_reasoning, second, tools)
        if separator is None or call_id is None:
            return separator
        return replace(separator, closing=separator.closing.replace(CALL_ID, self._adapter.to_template_id(call_id)))

    def find_stop_token(self, text: str, start: int, end: int) -> int:
        """Return the position of the first stop token in [start, end), or `end`."""
        positions = (text.find(stop, start, end) for stop in self._stop_texts)
        return min((position for position in positions if position >= 0), default=end)

    def _lookup(self, first: MessageKind, second: MessageKind, tools: Sequence[Mapping[str, Any]]) -> Separator | None:
        if first.role in SYSTEM_ROLES and tools:
            return self._derive(first, second, tools)  # many templates list the tools after the system prompt
        return self._cached_derive(first, second, bool(tools))

    def _derive_with_probe_tool(self, first: MessageKind, second: MessageKind, has_tools: bool) -> Separator | None:
        return self._derive(first, second, [PROBE_TOOL] if has_tools else [])

    def _derive(self, first: MessageKind, second: MessageKind, tools: Sequence[Mapping[str, Any]]) -> Separator | None:
        first_index, conversation = _example_conversation(first, second)
        sentinels = Sentinels()
        substituted = sentinels.substitute(conversation, include_arguments=True)
        try:
            text = self._adapter.render(substituted, tools, add_generation_prompt=second == GENERATION_PROMPT)
        except TemplateRefused:
            return None
        try:
            ending = self._adapter.render(substituted[: first_index + 1], tools)
        except TemplateRefused:
            ending = ""
        extents = message_extents(sentinels.find_slots(text))
        ending_extents = message_extents(sentinels.find_slots(ending))
        if first_index not in extents or (len(substituted) > first_index + 1 and first_index + 1 not in extents):
            return None
        stop = extents[first_index + 1][0] if first_index + 1 in extents else len(text)
        between = text[extents[first_index][1] : stop]
        closing_stop = 0
        if first_index in ending_extents:
            closing_stop = len(_shared_prefix(between, ending[ending_extents[first_index][1] :]))
        body_stop = self._body_tail_length(first, between, closing_stop)
        closing_stop = max(body_stop, closing_stop)
        return Separator(between[:body_stop], between[body_stop:closing_stop], between[closing_stop:])

    def _body_tail_length(self, kind: MessageKind, between: str, closing_stop: int) -> int:
        """Return how much of the text after a message's last text still belongs to its body.

        In a reply, this is all text that the model samples.
        """
        if kind.role != "assistant":
            return 0
        ends_with_text = kind.has_content and not kind.num_calls
        stop = self.find_stop_token(between, 0, len(between))
        if stop == len(between):
            return 0 if ends_with_text else closing_stop
        return stop if not ends_with_text or not between[:stop].strip() else 0


def _shared_prefix(between: str, ending: str) -> str:
    """Return the common prefix of two texts, shortened so that it ends in no open tag."""
    shared = between[: common_text_prefix_length(between, ending)]
    if shared not in (between, ending):
        for opens, closes in ("<>", "[]"):
            if shared.rfind(opens) > shared.rfind(closes):
                shared = shared[: shared.rfind(opens)]
    return shared


def _example_conversation(first: MessageKind, second: MessageKind) -> tuple[int, list[Message]]:
    """Return the index of the first kind in a short conversation with both kinds in a row, and the conversation."""
    question = Message("user", FILLER_TEXT)
    if first.role == "tool":
        caller, *results = MessageKind("assistant", num_calls=2 if second.role == "tool" else 1).example()
        leading, remaining = [question, caller], results
    else:
        leading = [question] if first.role == "assistant" else []
        remaining = first.example()
    if second.role == "tool":
        pair = (
            remaining[:2] if len(remaining) > 1 else [remaining[0], Message("tool", FILLER_TEXT, tool_call_id=CALL_ID)]
        )
    elif second in (GENERATION_PROMPT, END_OF_CONVERSATION):
        pair = remaining[:1]
    else:
        pair = [remaining[0], *second.example()[:1]]
    return len(leading), [*leading, *pair]


MAX_CACHED_LAYOUTS = 64


class MessageExtent(Struct, frozen=True):
    """The characters of a message: its body, and the end of the template text that closes it.

    The body is what the message itself says: reasoning, content and tool calls.
    """

    body: tuple[int, int]
    stop: int


class TextLayout(Struct, frozen=True):
    """The text of a conversation, and the extents of the requested messages."""

    text: str
    extents: tuple[MessageExtent, ...]
    is_coarse: bool = False  # only the ends of messages are known, not their bodies


class MessageLocator(Struct, frozen=True):
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
