"""The renderer for any Hugging Face chat template. The cost of a turn depends only on its new messages.

A template can only render whole conversations. To render just the end of one, the template gets the outline of the
history (a few short messages that it cannot distinguish from the real history) and the new messages. The text after the
last message of the outline equals the text after the real one; it is encoded and appended to the history's tokens. If
the template would change the history, the whole conversation is rendered again and a `PrefixBreak` says why.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid, ImageInvalid, TemplateRefused
from ramify.model.images import ImageCache, ImageFamily
from ramify.model.render.base import (
    BreakReason,
    ParsedReply,
    PrefixBreak,
    RenderedPrompt,
    Renderer,
    ReplyConstraint,
    TokenHistory,
)
from ramify.model.render.outline import FILLER_TEXT, ConversationOutline, MessageKind, message_kinds, without_text
from ramify.model.render.prompt_images import ExpandedText, MarkerFreeTexts, PlacedImage, PromptImages, has_images
from ramify.model.render.reply_grammar import ReplyGrammar, ReplyParser
from ramify.model.render.sentinels import REASONING, Sentinels, TextSlot, common_text_prefix_length
from ramify.model.render.template import ChatTemplate
from ramify.model.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.model.render.text_layout import END_OF_CONVERSATION, MessageExtent, SeparatorFinder, TextLayoutBuilder
from ramify.model.render.tokenizer import EncodedText, Tokenizer
from ramify.model.render.tool_parsers import TOOL_PARSERS, detect_tool_format, get_call_syntax
from ramify.model.render.tool_parsers.base import ToolSchema
from ramify.trace import Media, Message, MessageSpan, PromptMedia

MAX_CACHED_BREAKS = 4096
REASONING_DROPPED = PrefixBreak(BreakReason.REASONING_DROPPED, "the reasoning of an earlier turn is not shown again")


class PrefixChecker:
    """Checks whether one template preserves the prefix, once for each shape of conversation.

    The outline of the conversation is rendered before and after the new messages, with sentinels instead of texts. The
    history's tokens may be reused if the earlier prompt is a prefix of the later text and the reasoning of the reply is
    still shown. The layout of the reply itself is not compared, because its sampled tokens are kept anyway.
    """

    def __init__(self, adapter: TemplateAdapter) -> None:
        self._adapter = adapter
        self._cached_breaks: dict[object, PrefixBreak | None] = {}

    def find_break(
        self, outline: ConversationOutline, messages: Sequence[Message], *, has_tools: bool
    ) -> PrefixBreak | None:
        """Return why the tokens of a conversation that ends in a reply cannot be reused before `messages`, or None."""
        key = (outline.cache_key, message_kinds(messages), has_tools)
        if key not in self._cached_breaks:
            if len(self._cached_breaks) >= MAX_CACHED_BREAKS:
                self._cached_breaks.clear()
            tools = [PROBE_TOOL] if has_tools else []
            try:
                self._cached_breaks[key] = self._compare_renderings(outline, messages, tools)
            except TemplateRefused as error:
                self._cached_breaks[key] = PrefixBreak(BreakReason.UNCLEAR, str(error))
        return self._cached_breaks[key]

    def _compare_renderings(
        self, outline: ConversationOutline, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> PrefixBreak | None:
        sentinels = Sentinels()
        example = outline.example_messages()
        substituted = sentinels.substitute([*example, *map(without_text, messages)], include_arguments=True)
        reply_index = len(example) - 1
        prompt_text = self._adapter.render(substituted[:reply_index], tools, add_generation_prompt=True)
        full_text = self._adapter.render(substituted, tools, add_generation_prompt=True)
        slots = sentinels.find_slots(full_text)
        expected_reasoning = _messages_with_reasoning(sentinels.find_slots(prompt_text))
        if substituted[reply_index].reasoning:
            expected_reasoning.add(reply_index)
        if expected_reasoning - _messages_with_reasoning(slots):
            return REASONING_DROPPED
        common_length = common_text_prefix_length(full_text, prompt_text)
        if common_length < len(prompt_text):
            reason = self._break_reason(substituted[:reply_index], tools, prompt_text, common_length)
            return PrefixBreak(reason, _describe_difference(sentinels, prompt_text, full_text, common_length))
        if substituted[reply_index].reasoning == "":  # empty reasoning has no sentinel, only its tags
            first_start = next((slot.start for slot in slots if slot.start >= len(prompt_text)), len(full_text))
            if self._adapter.reasoning_tags.stop not in full_text[len(prompt_text) : first_start]:
                return REASONING_DROPPED
        return None

    def _break_reason(
        self, prompt_messages: list[Message], tools: list[dict[str, Any]], prompt: str, common_length: int
    ) -> BreakReason:
        """Return whether the template changed only the generation prompt or also earlier text."""
        text = self._adapter.render(prompt_messages, tools) if prompt_messages else ""
        if common_length >= common_text_prefix_length(prompt, text):
            return BreakReason.GENERATION_PROMPT_DROPPED
        return BreakReason.HISTORY_REWRITTEN


def _messages_with_reasoning(slots: Sequence[TextSlot]) -> set[int]:
    return {slot.message_index for slot in slots if slot.field == REASONING}


def _describe_difference(sentinels: Sentinels, before: str, after: str, position: int) -> str:
    """Describe the first difference of two texts, from the start of a sentinel or word."""
    position = max(0, *(before.rfind(start, 0, position) for start in (" ", "\n", "<", "[")))
    return f"{sentinels.redact(before[position:])[:40]!r} becomes {sentinels.redact(after[position:])[:40]!r}"


class TemplateRenderer(Renderer):
    """The `Renderer` of a tokenizer and a chat template.

    `load_image_family` returns the model's image family; it is called when the first image is rendered.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_ids: Sequence[int] = (),
        tool_format: str = "auto",
        history: Literal["template", "verbatim"] = "template",
        load_image_family: Callable[[], ImageFamily | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._load_image_family = load_image_family
        self.tokenizer = tokenizer
        template.check_limits()
        self._adapter = TemplateAdapter(template)
        self.stop_ids = self._find_stop_ids(eos_ids)
        stop_texts = [text for id in self.stop_ids if (text := tokenizer.id_to_token(id)) is not None]
        self._separators = SeparatorFinder(self._adapter, stop_texts)
        self._layout_builder = TextLayoutBuilder(self._adapter, self._separators)
        self._prefix_checker = PrefixChecker(self._adapter)
        self._keeps_history_verbatim = history == "verbatim"
        self.tool_format = (
            detect_tool_format(template, tokenizer.added_tokens) if tool_format == "auto" else tool_format
        )
        self._reply_parser = ReplyParser(
            tokenizer,
            self.stop_ids,
            self._adapter.reasoning_tags,
            TOOL_PARSERS[self.tool_format],
            self._reply_whitespace(),
        )
        tags = self._adapter.reasoning_tags
        self._reply_grammar = ReplyGrammar(
            tokenizer, tags if tags.stop in template else None, get_call_syntax(self.tool_format, template)
        )

    @cached_property
    def image_cache(self) -> ImageCache | None:
        """Processes the images of the model; None if it takes none. Raises ModelUnsupported for an unknown family."""
        family = self._load_image_family()
        return None if family is None else ImageCache(family)

    @cached_property
    def takes_tool_images(self) -> bool:
        """Whether the template writes the images of tool results."""
        cache = self.image_cache
        return cache is not None and self._adapter.writes_tool_images(cache.family.marker)

    @cached_property
    def _prompt_images(self) -> PromptImages:
        if self.image_cache is None:
            raise ImageInvalid(f"image: {self.tokenizer.name} is a text model; send text only, or use a vision model")
        return PromptImages(self.image_cache)

    def _render_uncached(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        if tools and not self._adapter.has_tool_support:
            raise TemplateRefused("the chat template does not support tools; remove the tools, or use another template")
        marker_free = self._hide_markers(messages, tools)
        layout = self._layout_builder.build(
            marker_free.messages, marker_free.tools, add_generation_prompt=add_generation_prompt
        )
        expanded, extents = self._expand_images(layout.text, layout.extents, marker_free.sentinel, messages, media)
        encoded = self.tokenizer.encode(expanded.text)
        return RenderedPrompt(
            messages=tuple(messages),
            tools=tuple(tools),
            token_ids=encoded.ids,
            spans=_message_spans(messages, extents, encoded),
            outline=ConversationOutline().extend(messages),
            media=self._locate_media(expanded.images, encoded),
        )

    def parse(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        """Parse sampled tokens to a reply."""
        return self._reply_parser.parse(np.asarray(sampled_ids, np.int32), prompt)

    def build_grammar(self, prompt: RenderedPrompt, constraint: ReplyConstraint) -> str:
        """Return the grammar of the replies to `prompt` that satisfy `constraint`. Raises RequestInvalid."""
        return self._reply_grammar.build(prompt, constraint)

    def _render_continuation(
        self, history: TokenHistory, messages: Sequence[Message], media: Mapping[str, Media]
    ) -> RenderedPrompt | PrefixBreak:
        """Return the history's tokens followed by the template's text for the new messages."""
        if not self._keeps_history_verbatim:
            has_tools = bool(history.tools)
            prefix_break = self._prefix_checker.find_break(history.outline, messages, has_tools=has_tools)
            if prefix_break is not None:
                return prefix_break
        example = history.outline.example_messages()
        marker_free = self._hide_markers(messages, history.tools)
        conversation = [*example, *marker_free.messages]
        try:
            layout = self._layout_builder.build(
                conversation, marker_free.tools, add_generation_prompt=True, first=len(example) - 1
            )
        except TemplateRefused as error:
            return PrefixBreak(BreakReason.UNCLEAR, str(error))
        if layout.is_coarse:
            return PrefixBreak(BreakReason.UNCLEAR, "the template's own text depends on the texts of messages")
        start = layout.extents[0].body[1]
        closing = self._reasoning_close(history)
        offset = len(closing) - start
        extents = [
            MessageExtent((extent.body[0] + offset, extent.body[1] + offset), extent.stop + offset)
            for extent in layout.extents[1:]
        ]
        text = closing + layout.text[start:]
        expanded, extents = self._expand_images(text, extents, marker_free.sentinel, messages, media)
        encoded = self.tokenizer.encode(expanded.text, continues_text=True)
        # Skip the stop token if the model has sampled it already and the template would write it here.
        num_held = 1 if history.token_ids[-1] in self.stop_ids and history.token_ids[-1] == encoded.ids[0] else 0
        new = EncodedText(encoded.ids[num_held:], encoded.starts[num_held:], encoded.stops[num_held:])
        token_ids = np.concatenate([history.token_ids, new.ids])
        spans = _message_spans(messages, extents, new)
        return history.build_prompt(messages, token_ids, spans, self._locate_media(expanded.images, new))

    def _hide_markers(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> MarkerFreeTexts:
        """Hide the marker of an image in texts; without images nothing is changed."""
        if any(map(has_images, messages)):
            return self._prompt_images.hide_markers(messages, tools)
        return MarkerFreeTexts(list(messages), tools, "")

    def _expand_images(
        self,
        text: str,
        extents: Sequence[MessageExtent],
        sentinel: str,
        messages: Sequence[Message],
        media: Mapping[str, Media],
    ) -> tuple[ExpandedText, Sequence[MessageExtent]]:
        """Put placeholders into a text, and widen the extents of messages to their images."""
        if not any(map(has_images, messages)):
            return ExpandedText(text), extents
        expanded = self._prompt_images.expand(text, sentinel, messages, media)
        widened = [
            MessageExtent((expanded.shift(extent.body[0]), expanded.shift(extent.body[1])), expanded.shift(extent.stop))
            for extent in extents
        ]
        for image in expanded.images:
            (start, stop), end = widened[image.part.message_index].body, widened[image.part.message_index].stop
            body = (min(start, image.start), max(stop, image.stop)) if start < stop else (image.start, image.stop)
            widened[image.part.message_index] = MessageExtent(body, max(end, image.stop))
        return expanded, widened

    def _locate_media(self, images: Sequence[PlacedImage], encoded: EncodedText) -> tuple[PromptMedia, ...]:
        """Return the placeholder tokens of images."""
        if not images:
            return ()
        starts, stops = encoded.starts.tolist(), encoded.stops.tolist()
        located: list[PromptMedia] = []
        for image in images:
            start, stop = bisect_right(stops, image.start), bisect_left(starts, image.stop)
            image_token_id = self._prompt_images.cache.family.image_token_id
            num_tokens = int((encoded.ids[start:stop] == image_token_id).sum())
            if num_tokens != image.num_tokens:
                raise ConfigInvalid(
                    f"model: the tokenizer writes an image of {image.num_tokens} tokens with {num_tokens} "
                    f"tokens of id {image_token_id}; correct image_token_id, or add the image token to the tokenizer"
                )
            located.append(PromptMedia(image.media, image.part.message_index, image.part.part, start, stop))
        return tuple(located)

    def _reasoning_close(self, history: TokenHistory) -> str:
        """Return the text that closes reasoning which was cut off, or an empty string."""
        message = history.messages[-1]
        if history.token_ids[-1] in self.stop_ids or message.reasoning is None or message.text or message.tool_calls:
            return ""
        if self._adapter.reasoning_tags.stop in self.tokenizer.decode(history.token_ids[-history.num_sampled :]):
            return ""
        separator = self._separators.find(MessageKind.from_message(message), END_OF_CONVERSATION)
        return separator.body_tail if separator else f"\n{self._adapter.reasoning_tags.stop}\n\n"

    def _find_stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the end-of-text ids of the model and the token with which the template closes a reply."""
        _, text_after = self._text_around_reply()
        closing_ids = [id for token, id in self.tokenizer.added_tokens.items() if text_after.lstrip().startswith(token)]
        return tuple(dict.fromkeys([*eos_ids, *closing_ids]))

    def _reply_whitespace(self) -> tuple[str, str]:
        """Return the whitespace that the template writes before and after a reply's text."""
        before, _ = self._text_around_reply()
        separator = self._separators.find(MessageKind("assistant"), END_OF_CONVERSATION)
        after = separator.body_tail if separator else ""
        return before if before.isspace() else "", after if after.isspace() else ""

    def _text_around_reply(self) -> tuple[str, str]:
        """Return the template's text between the generation prompt and a reply's text, and after the reply."""
        sentinels = Sentinels()
        question, reply = sentinels.substitute([Message("user", FILLER_TEXT), Message("assistant", FILLER_TEXT)])
        try:
            prompt = self._adapter.render([question], add_generation_prompt=True)
            text = self._adapter.render([question, reply])
        except TemplateRefused:
            return "", ""
        slot = next((slot for slot in sentinels.find_slots(text) if slot.message_index == 1), None)
        if slot is None:
            return "", ""
        return text[len(prompt) : slot.start] if text.startswith(prompt) else "", text[slot.stop :]


def _message_spans(
    messages: Sequence[Message], extents: Sequence[MessageExtent], encoded: EncodedText
) -> tuple[MessageSpan, ...]:
    """Convert extents to token spans; a token belongs to the message of its first character."""
    spans: list[MessageSpan] = []
    previous_stop = 0
    starts, stops = encoded.starts.tolist(), encoded.stops.tolist()
    for message, extent in zip(messages, extents, strict=True):
        stop = max(previous_stop, bisect_left(starts, extent.stop))
        content_start = bisect_right(stops, extent.body[0])
        content_stop = bisect_left(starts, extent.body[1])
        content_stop = min(max(content_stop, previous_stop), stop)
        content_start = (
            min(max(content_start, previous_stop), content_stop) if extent.body[0] < extent.body[1] else content_stop
        )
        spans.append(MessageSpan(message, stop, (content_start, content_stop)))
        previous_stop = stop
    return tuple(spans)
