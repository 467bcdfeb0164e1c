"""The renderer for any Hugging Face chat template: turn n costs what its new messages cost.

A template only knows how to write whole conversations. To write just the end of one, it is given the conversation's
outline (a few short messages that it cannot tell from the real history) and the new messages; what it writes behind the
outline's last message is what it would write behind the real one. That text is encoded and appended to the tokens as
they are. Where the template would change what is already there, everything is rendered anew and the break is named.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ramify.errors import TemplateRefused
from ramify.render.base import BreakReason, ParsedReply, PrefixBreak, RenderedPrompt, TokenHistory, ToolSchema
from ramify.render.bounded_cache import BoundedCache
from ramify.render.outline import FILLER_TEXT, ConversationOutline, MessageKind
from ramify.render.prefix_check import PrefixChecker
from ramify.render.reply_parser import ReplyParser
from ramify.render.sentinels import Sentinels
from ramify.render.separators import END_OF_CONVERSATION, SeparatorFinder
from ramify.render.template import ChatTemplate
from ramify.render.template_adapter import TemplateAdapter
from ramify.render.text_layout import MessageExtent, TextLayoutBuilder
from ramify.render.tokenizer import EncodedText, Tokenizer
from ramify.render.tool_parsers import TOOL_PARSERS, detect_tool_format
from ramify.trace import Message, MessageSpan

MAX_CACHED_PROMPTS = 64


class TemplateRenderer:
    """Messages to ids and back, through a tokenizer and a chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_ids: Sequence[int] = (),
        tool_format: str = "auto",
        history: Literal["template", "verbatim"] = "template",
    ) -> None:
        self.tokenizer = tokenizer
        self._adapter = TemplateAdapter(template)
        self.stop_ids = self._find_stop_ids(eos_ids)
        stops = [text for id in self.stop_ids if (text := tokenizer.id_to_token(id)) is not None]
        self._separators = SeparatorFinder(self._adapter, stops)
        self._layout_builder = TextLayoutBuilder(self._adapter, self._separators)
        self._prefix_checker = PrefixChecker(self._adapter)
        self._keeps_history_verbatim = history == "verbatim"
        self._cached_prompts: BoundedCache[tuple[tuple[Message, ...], bool], RenderedPrompt] = BoundedCache(
            MAX_CACHED_PROMPTS
        )
        self.tool_format = detect_tool_format(template, tokenizer) if tool_format == "auto" else tool_format
        self._reply_parser = ReplyParser(
            tokenizer,
            self.stop_ids,
            self._adapter.reasoning_tags,
            TOOL_PARSERS[self.tool_format],
            self._reply_whitespace(),
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        """The prompt. All attempts at a task begin with the same one, so the latest are remembered."""
        key = (tuple(messages), add_generation_prompt)
        known = self._cached_prompts.get(key)
        if known is None or known.tools != tuple(tools):
            known = self._render_uncached(messages, tools, add_generation_prompt=add_generation_prompt)
            self._cached_prompts.put(key, known)
        return known

    def _render_uncached(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        if tools and not self._adapter.has_tool_support:
            raise TemplateRefused("the chat template shows no tools, and some are offered")
        layout = self._layout_builder.build(messages, tools, add_generation_prompt=add_generation_prompt)
        encoded = self.tokenizer.encode(layout.text)
        return RenderedPrompt(
            messages=tuple(messages),
            tools=tuple(tools),
            token_ids=encoded.ids,
            spans=_message_spans(messages, layout.extents, encoded),
            outline=ConversationOutline.from_messages(messages),
        )

    def bridge(
        self, history: TokenHistory, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> RenderedPrompt:
        offered = history.tools if tools is None else tuple(tools)
        broke = self._find_break(history, messages, offered)
        if broke is None and history.num_sampled:
            continued = self._render_continuation(history, messages)
            if isinstance(continued, RenderedPrompt):
                return continued
            broke = continued
        return self._render_uncached([*history.messages, *messages], offered).as_continuation(history, broke)

    def parse(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        return self._reply_parser.parse(np.asarray(sampled_ids, np.int32), prompt)

    def _find_break(
        self, history: TokenHistory, messages: Sequence[Message], tools: tuple[ToolSchema, ...]
    ) -> PrefixBreak | None:
        if tools != history.tools:
            return PrefixBreak(BreakReason.TOOLS_CHANGED)
        if self._keeps_history_verbatim or not history.num_sampled:
            return None
        return self._prefix_checker.find_break(history.outline, messages, has_tools=bool(tools))

    def _render_continuation(self, history: TokenHistory, messages: Sequence[Message]) -> RenderedPrompt | PrefixBreak:
        """The history's tokens and what the template writes behind their last body, given the new messages."""
        before = history.outline.example_messages()
        conversation = [*before, *messages]
        try:
            layout = self._layout_builder.build(
                conversation, history.tools, add_generation_prompt=True, first=len(before) - 1
            )
        except TemplateRefused as error:
            return PrefixBreak(BreakReason.UNCLEAR, str(error))
        if layout.is_coarse:
            return PrefixBreak(BreakReason.UNCLEAR, "the template's scaffold depends on what messages say")
        start = layout.extents[0].body[1]
        closing = self._reasoning_close(history)
        written = self.tokenizer.encode(closing + layout.text[start:], continues_text=True)
        # The model's own stop token is already there; one that the template does not write here is not its close.
        held = 1 if history.token_ids[-1] in self.stop_ids and history.token_ids[-1] == written.ids[0] else 0
        added = EncodedText(written.ids[held:], written.starts[held:], written.stops[held:])
        places = [_shift_extent(place, len(closing) - start) for place in layout.extents[1:]]
        outline = history.outline
        for message in messages:
            outline = outline.add(message)
        return RenderedPrompt(
            messages=(*history.messages, *messages),
            tools=history.tools,
            token_ids=np.concatenate([history.token_ids, added.ids]),
            spans=_message_spans(messages, places, added),
            outline=outline,
            num_reused=len(history.token_ids),
        )

    def _reasoning_close(self, history: TokenHistory) -> str:
        """What the template would have written to end reasoning that was cut off."""
        message = history.messages[-1]
        if history.token_ids[-1] in self.stop_ids or message.reasoning is None or message.text or message.tool_calls:
            return ""
        if self._adapter.reasoning_tags.stop in self.tokenizer.decode(history.token_ids[-history.num_sampled :]):
            return ""
        seam = self._separators.find(MessageKind.from_message(message), END_OF_CONVERSATION)
        return seam.body_tail if seam else f"\n{self._adapter.reasoning_tags.stop}\n\n"

    def _find_stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The model's own ends, and the token with which the template closes a reply."""
        _, behind = self._text_around_reply()
        closing = [id for token, id in self.tokenizer.added_tokens.items() if behind.lstrip().startswith(token)]
        return tuple(dict.fromkeys([*eos_ids, *closing]))

    def _reply_whitespace(self) -> tuple[str, str]:
        """The space that the template sets around a reply's text; it is not part of what is said."""
        before, _ = self._text_around_reply()
        seam = self._separators.find(MessageKind("assistant"), END_OF_CONVERSATION)
        behind = seam.body_tail if seam else ""
        return before if before.isspace() else "", behind if behind.isspace() else ""

    def _text_around_reply(self) -> tuple[str, str]:
        """What the template writes between the generation prompt and a reply's text, and behind it."""
        marks = Sentinels()
        asked, replied = marks.substitute([Message("user", FILLER_TEXT), Message("assistant", FILLER_TEXT)])
        try:
            prompt, text = (
                self._adapter.render([asked], add_generation_prompt=True),
                self._adapter.render([asked, replied]),
            )
        except TemplateRefused:
            return "", ""
        slot = next((slot for slot in marks.find_slots(text) if slot.message_index == 1), None)
        if slot is None:
            return "", ""
        return text[len(prompt) : slot.start] if text.startswith(prompt) else "", text[slot.stop :]


def _message_spans(
    messages: Sequence[Message], extents: Sequence[MessageExtent], encoded: EncodedText
) -> tuple[MessageSpan, ...]:
    """Characters to tokens: a token belongs to the message that its first character is in."""
    spans: list[MessageSpan] = []
    before = 0
    starts, stops = encoded.starts.tolist(), encoded.stops.tolist()
    for message, place in zip(messages, extents, strict=True):
        stop = max(before, bisect_left(starts, place.stop))
        low = bisect_right(stops, place.body[0])
        high = bisect_left(starts, place.body[1])
        high = min(max(high, before), stop)
        low = min(max(low, before), high) if place.body[0] < place.body[1] else high
        spans.append(MessageSpan(message, stop, (low, high)))
        before = stop
    return tuple(spans)


def _shift_extent(extent: MessageExtent, offset: int) -> MessageExtent:
    return MessageExtent((extent.body[0] + offset, extent.body[1] + offset), extent.stop + offset)
