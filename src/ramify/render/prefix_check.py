"""Does this template keep what it wrote? Asked once for each shape of conversation.

The tokens we hold are the template's prompt and the reply. They may stay if the template, shown reply and new messages
too, still begins with exactly that prompt, and does not hide the reply's reasoning. Two renderings of the outline, with
marks for texts, decide it. How a template would space or order the reply is not asked: its tokens are what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.errors import TemplateRefused
from ramify.render.base import BreakReason, PrefixBreak
from ramify.render.outline import ConversationOutline, message_kinds, without_text
from ramify.render.sentinels import REASONING, Sentinels, common_text_prefix_length
from ramify.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.trace import Message

MAX_CACHED_BREAKS = 4096
REASONING_DROPPED = PrefixBreak(BreakReason.REASONING_DROPPED, "the thinking of an earlier turn is not shown again")


class PrefixChecker:
    """Verdicts on one template."""

    def __init__(self, adapter: TemplateAdapter) -> None:
        self._adapter = adapter
        self._cached_breaks: dict[object, PrefixBreak | None] = {}

    def find_break(
        self, outline: ConversationOutline, messages: Sequence[Message], *, has_tools: bool
    ) -> PrefixBreak | None:
        """Why the tokens of a conversation that ends in a reply cannot stay when such messages follow, or None."""
        key = (outline.cache_key, message_kinds(messages), has_tools)
        if key not in self._cached_breaks:
            if len(self._cached_breaks) >= MAX_CACHED_BREAKS:
                self._cached_breaks.clear()
            try:
                self._cached_breaks[key] = self._compare_renderings(
                    outline, messages, [PROBE_TOOL] if has_tools else []
                )
            except TemplateRefused as error:
                self._cached_breaks[key] = PrefixBreak(BreakReason.UNCLEAR, str(error))
        return self._cached_breaks[key]

    def _compare_renderings(
        self, outline: ConversationOutline, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> PrefixBreak | None:
        marks = Sentinels()
        before = outline.example_messages()
        marked = marks.substitute([*before, *map(without_text, messages)], include_arguments=True)
        reply = len(before) - 1
        prompt = self._adapter.render(marked[:reply], tools, add_generation_prompt=True)
        now = self._adapter.render(marked, tools, add_generation_prompt=True)
        shown = marks.find_slots(now)
        thought = {slot.message_index for slot in marks.find_slots(prompt) if slot.field == REASONING}
        if marked[reply].reasoning:
            thought.add(reply)
        if thought - {slot.message_index for slot in shown if slot.field == REASONING}:
            return REASONING_DROPPED
        same = common_text_prefix_length(now, prompt)
        if same < len(prompt):
            return PrefixBreak(
                self._break_reason(marked[:reply], tools, prompt, same), _describe_difference(marks, prompt, now, same)
            )
        if marked[reply].reasoning == "":  # an empty thought has no mark, only its tags
            first = next((slot.start for slot in shown if slot.start >= len(prompt)), len(now))
            return None if self._adapter.reasoning_tags.stop in now[len(prompt) : first] else REASONING_DROPPED
        return None

    def _break_reason(
        self, prompt_messages: list[Message], tools: list[dict[str, Any]], prompt: str, common_length: int
    ) -> BreakReason:
        """What of the prompt the template changed: only that which opened the reply, or more."""
        opening = (
            common_text_prefix_length(prompt, self._adapter.render(prompt_messages, tools)) if prompt_messages else 0
        )
        return BreakReason.GENERATION_PROMPT_DROPPED if common_length >= opening else BreakReason.HISTORY_REWRITTEN


def _describe_difference(sentinels: Sentinels, before: str, after: str, position: int) -> str:
    """The first words that differ, from the start of a mark or word on."""
    position = max(
        before.rfind(" ", 0, position),
        before.rfind("\n", 0, position),
        before.rfind("<", 0, position),
        before.rfind("[", 0, position),
        0,
    )
    return f"{sentinels.redact(before[position:])[:40]!r} becomes {sentinels.redact(after[position:])[:40]!r}"
