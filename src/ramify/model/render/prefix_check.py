"""Is a template prefix-preserving? Tested once for each shape of conversation.

The outline of the conversation is rendered before and after the new messages, with sentinels instead of texts. The
history's tokens may be reused if the earlier prompt is a prefix of the later text and the reasoning of the reply is
still shown. The layout of the reply itself is not compared, because its sampled tokens are kept anyway.
"""

from collections.abc import Sequence
from typing import Any

from ramify.core.errors import TemplateRefused
from ramify.model.render.base import BreakReason, PrefixBreak
from ramify.model.render.outline import ConversationOutline, message_kinds, without_text
from ramify.model.render.sentinels import REASONING, Sentinels, TextSlot, common_text_prefix_length
from ramify.model.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.trace import Message

MAX_CACHED_BREAKS = 4096
REASONING_DROPPED = PrefixBreak(BreakReason.REASONING_DROPPED, "the reasoning of an earlier turn is not shown again")


class PrefixChecker:
    """Checks whether one template preserves the prefix, and caches the results."""

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
