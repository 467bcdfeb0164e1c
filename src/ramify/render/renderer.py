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
from ramify.render.calls import FORMATS, recognise
from ramify.render.conversation import Break, History, Parsed, Reason, Rendered, Tool
from ramify.render.keeping import Keeping
from ramify.render.layout import Layouts, Place
from ramify.render.marks import Marks
from ramify.render.outline import FILLER, Kind, Outline
from ramify.render.recent import RecentCache
from ramify.render.reply import ReplyReader
from ramify.render.seams import NOTHING, Seams
from ramify.render.template import ChatTemplate
from ramify.render.tokenizer import Encoded, Tokenizer
from ramify.render.writer import Writer
from ramify.trace import Message, MessageSpan

MOST_PROMPTS = 64


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
        self._writer = Writer(template)
        self.stop_ids = self._find_stop_ids(eos_ids)
        stops = [text for id in self.stop_ids if (text := tokenizer.token_of(id)) is not None]
        self._seams = Seams(self._writer, stops)
        self._layouts = Layouts(self._writer, self._seams)
        self._keeping = Keeping(self._writer)
        self._verbatim = history == "verbatim"
        self._prompts: RecentCache[tuple[tuple[Message, ...], bool], Rendered] = RecentCache(MOST_PROMPTS)
        self.tool_format = recognise(template, tokenizer) if tool_format == "auto" else tool_format
        self._reader = ReplyReader(
            tokenizer, self.stop_ids, self._writer.tags, FORMATS[self.tool_format], self._margins()
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = True) -> Rendered:
        """The prompt. All attempts at a task begin with the same one, so the latest are remembered."""
        key = (tuple(messages), generate)
        known = self._prompts.get(key)
        if known is None or known.tools != tuple(tools):
            known = self._render(messages, tools, generate=generate)
            self._prompts.put(key, known)
        return known

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True) -> Rendered:
        if tools and not self._writer.shows_tools:
            raise TemplateRefused("the chat template shows no tools, and some are offered")
        layout = self._layouts.lay_out(messages, tools, generate=generate)
        encoded = self.tokenizer.encode(layout.text)
        return Rendered(
            messages=tuple(messages),
            tools=tuple(tools),
            ids=encoded.ids,
            spans=_spans(messages, layout.places, encoded),
            outline=Outline.of(messages),
        )

    def bridge(self, history: History, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Rendered:
        offered = history.tools if tools is None else tuple(tools)
        broke = self._obstacle(history, messages, offered)
        if broke is None and history.sampled:
            continued = self._continue(history, messages)
            if isinstance(continued, Rendered):
                return continued
            broke = continued
        return self._render([*history.messages, *messages], offered).continuing(history, broke)

    def parse(self, sampled: npt.ArrayLike, prompt: Rendered) -> Parsed:
        return self._reader.read(np.asarray(sampled, np.int32), prompt)

    def _obstacle(self, history: History, messages: Sequence[Message], tools: tuple[Tool, ...]) -> Break | None:
        if tools != history.tools:
            return Break(Reason.TOOLS_CHANGED)
        if self._verbatim or not history.sampled:
            return None
        return self._keeping.obstacle(history.outline, messages, tools=bool(tools))

    def _continue(self, history: History, messages: Sequence[Message]) -> Rendered | Break:
        """The history's tokens and what the template writes behind their last body, given the new messages."""
        before = history.outline.messages()
        conversation = [*before, *messages]
        try:
            layout = self._layouts.lay_out(conversation, history.tools, generate=True, first=len(before) - 1)
        except TemplateRefused as error:
            return Break(Reason.UNCLEAR, str(error))
        if layout.coarse:
            return Break(Reason.UNCLEAR, "the template's scaffold depends on what messages say")
        start = layout.places[0].body[1]
        closing = self._closing(history)
        written = self.tokenizer.encode(closing + layout.text[start:], inside=True)
        # The model's own stop token is already there; one that the template does not write here is not its close.
        held = 1 if history.ids[-1] in self.stop_ids and history.ids[-1] == written.ids[0] else 0
        added = Encoded(written.ids[held:], written.starts[held:], written.stops[held:])
        places = [_moved(place, len(closing) - start) for place in layout.places[1:]]
        outline = history.outline
        for message in messages:
            outline = outline.add(message)
        return Rendered(
            messages=(*history.messages, *messages),
            tools=history.tools,
            ids=np.concatenate([history.ids, added.ids]),
            spans=_spans(messages, places, added),
            outline=outline,
            kept=len(history.ids),
        )

    def _closing(self, history: History) -> str:
        """What the template would have written to end reasoning that was cut off."""
        message = history.messages[-1]
        if history.ids[-1] in self.stop_ids or message.reasoning is None or message.text or message.tool_calls:
            return ""
        if self._writer.tags.stop in self.tokenizer.decode(history.ids[-history.sampled :]):
            return ""
        seam = self._seams.between(Kind.of(message), NOTHING)
        return seam.rest if seam else f"\n{self._writer.tags.stop}\n\n"

    def _find_stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The model's own ends, and the token with which the template closes a reply."""
        _, behind = self._around_reply()
        closing = [id for token, id in self.tokenizer.added_ids.items() if behind.lstrip().startswith(token)]
        return tuple(dict.fromkeys([*eos_ids, *closing]))

    def _margins(self) -> tuple[str, str]:
        """The space that the template sets around a reply's text; it is not part of what is said."""
        before, _ = self._around_reply()
        seam = self._seams.between(Kind("assistant"), NOTHING)
        behind = seam.rest if seam else ""
        return before if before.isspace() else "", behind if behind.isspace() else ""

    def _around_reply(self) -> tuple[str, str]:
        """What the template writes between the generation prompt and a reply's text, and behind it."""
        marks = Marks()
        asked, replied = marks.mark([Message("user", FILLER), Message("assistant", FILLER)])
        try:
            prompt, text = self._writer.text([asked], generate=True), self._writer.text([asked, replied])
        except TemplateRefused:
            return "", ""
        slot = next((slot for slot in marks.slots(text) if slot.message == 1), None)
        if slot is None:
            return "", ""
        return text[len(prompt) : slot.start] if text.startswith(prompt) else "", text[slot.stop :]


def _spans(messages: Sequence[Message], places: Sequence[Place], encoded: Encoded) -> tuple[MessageSpan, ...]:
    """Characters to tokens: a token belongs to the message that its first character is in."""
    spans: list[MessageSpan] = []
    before = 0
    starts, stops = encoded.starts.tolist(), encoded.stops.tolist()
    for message, place in zip(messages, places, strict=True):
        stop = max(before, bisect_left(starts, place.stop))
        low = bisect_right(stops, place.body[0])
        high = bisect_left(starts, place.body[1])
        high = min(max(high, before), stop)
        low = min(max(low, before), high) if place.body[0] < place.body[1] else high
        spans.append(MessageSpan(message, stop, (low, high)))
        before = stop
    return tuple(spans)


def _moved(place: Place, by: int) -> Place:
    return Place((place.body[0] + by, place.body[1] + by), place.stop + by)
