"""Does this template keep what it wrote? Asked once for each shape of conversation.

The tokens we hold are the template's prompt and the reply. They may stay if the template, shown reply and new messages
too, still begins with exactly that prompt, and does not hide the reply's reasoning. Two renderings of the outline, with
marks for texts, decide it. How a template would space or order the reply is not asked: its tokens are what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.errors import TemplateRefused
from ramify.render.conversation import Break, Reason
from ramify.render.marks import REASONING, Marks, common_prefix
from ramify.render.outline import Outline, kinds, stub
from ramify.render.writer import ANY_TOOL, Writer
from ramify.trace import Message

MOST_KNOWN = 4096
DROPPED = Break(Reason.REASONING_DROPPED, "the thinking of an earlier turn is not shown again")


class Keeping:
    """Verdicts on one template."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[object, Break | None] = {}

    def obstacle(self, outline: Outline, messages: Sequence[Message], *, tools: bool) -> Break | None:
        """Why the tokens of a conversation that ends in a reply cannot stay when such messages follow, or None."""
        key = (outline.shape, kinds(messages), tools)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            try:
                self._known[key] = self._judge(outline, messages, [ANY_TOOL] if tools else [])
            except TemplateRefused as error:
                self._known[key] = Break(Reason.UNCLEAR, str(error))
        return self._known[key]

    def _judge(self, outline: Outline, messages: Sequence[Message], tools: list[dict[str, Any]]) -> Break | None:
        marks = Marks()
        before = outline.messages()
        marked = marks.mark([*before, *map(stub, messages)], arguments=True)
        reply = len(before) - 1
        prompt = self._writer.text(marked[:reply], tools, generate=True)
        now = self._writer.text(marked, tools, generate=True)
        shown = marks.slots(now)
        thought = {slot.message for slot in marks.slots(prompt) if slot.field == REASONING}
        if marked[reply].reasoning:
            thought.add(reply)
        if thought - {slot.message for slot in shown if slot.field == REASONING}:
            return DROPPED
        same = common_prefix(now, prompt)
        if same < len(prompt):
            return Break(self._rewritten(marked[:reply], tools, prompt, same), _difference(marks, prompt, now, same))
        if marked[reply].reasoning == "":  # an empty thought has no mark, only its tags
            first = next((slot.start for slot in shown if slot.start >= len(prompt)), len(now))
            return None if self._writer.tags.stop in now[len(prompt) : first] else DROPPED
        return None

    def _rewritten(self, asked: list[Message], tools: list[dict[str, Any]], prompt: str, same: int) -> Reason:
        """What of the prompt the template changed: only that which opened the reply, or more."""
        opening = common_prefix(prompt, self._writer.text(asked, tools)) if asked else 0
        return Reason.GENERATION_PROMPT_DROPPED if same >= opening else Reason.HISTORY_REWRITTEN


def _difference(marks: Marks, before: str, now: str, at: int) -> str:
    """The first words that differ, from the start of a mark or word on."""
    at = max(before.rfind(" ", 0, at), before.rfind("\n", 0, at), before.rfind("<", 0, at), before.rfind("[", 0, at), 0)
    return f"{marks.hide(before[at:])[:40]!r} becomes {marks.hide(now[at:])[:40]!r}"
