"""The scaffold between two messages: which part closes the first and which opens the second.

Asked of the template once per pair of kinds. Rendered as the last message, a message is followed by its close alone;
followed by another, by close and opening; what both have in common is the close. The same comparison finds where a
turn ends after tool calls, whose text no mark can stand for.

    user       <|im_end|>\\n   <|im_start|>assistant\\n
               after           opening
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ramify.errors import TemplateRefused
from ramify.render.outline import CALL_ID, FILLER_TEXT, SYSTEM_ROLES, MessageKind
from ramify.render.sentinels import Sentinels, common_text_prefix_length, message_extents
from ramify.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.trace import Message

GENERATION_PROMPT = MessageKind("generation prompt")
END_OF_CONVERSATION = MessageKind("nothing")


@dataclass(frozen=True, slots=True)
class Separator:
    """What stands between the last text of a message and the first of the next: `rest` + `after` + `opening`."""

    body_tail: str  # still the message's body: the end of its tool calls
    closing: str
    opening: str

    @property
    def text(self) -> str:
        """What stands between the two bodies."""
        return self.closing + self.opening


class SeparatorFinder:
    """The seams of one template."""

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
        """The seam of two kinds, or `GENERATE` or `NOTHING` as the second; None where the template will not tell.

        `call_id` is the first message's, for a template that shows it behind a tool's result.
        """
        seam = self._lookup(first, second, tools)
        if seam is None and first.reasoning is not None:
            # The template hides the reasoning of an earlier turn, but the rest of the message stands as ever.
            seam = self._lookup(
                first._replace(reasoning=None, has_content=first.has_content or not first.num_calls), second, tools
            )
        if seam is None or call_id is None:
            return seam
        return replace(seam, closing=seam.closing.replace(CALL_ID, self._adapter.to_template_id(call_id)))

    def find_stop_token(self, text: str, start: int, end: int) -> int:
        """Where the first stop token within [start, end) stands; `end` if there is none."""
        found = (text.find(stop, start, end) for stop in self._stop_texts)
        return min((at for at in found if at >= 0), default=end)

    def _lookup(self, first: MessageKind, second: MessageKind, tools: Sequence[Mapping[str, Any]]) -> Separator | None:
        if first.role in SYSTEM_ROLES and tools:
            return self._derive(first, second, tools)  # many templates list the tools behind the system prompt
        return self._cached_derive(first, second, bool(tools))

    def _derive_with_probe_tool(self, first: MessageKind, second: MessageKind, has_tools: bool) -> Separator | None:
        return self._derive(first, second, [PROBE_TOOL] if has_tools else [])

    def _derive(self, first: MessageKind, second: MessageKind, tools: Sequence[Mapping[str, Any]]) -> Separator | None:
        before, conversation = _example_conversation(first, second)
        marks = Sentinels()
        marked = marks.substitute(conversation, include_arguments=True)
        alone = marked[: before + 1]
        try:
            text = self._adapter.render(marked, tools, add_generation_prompt=second == GENERATION_PROMPT)
        except TemplateRefused:
            return None
        try:
            ending = self._adapter.render(alone, tools)
        except TemplateRefused:
            ending = ""
        found, last = message_extents(marks.find_slots(text)), message_extents(marks.find_slots(ending))
        if before not in found or (len(marked) > before + 1 and before + 1 not in found):
            return None
        stop = found[before + 1][0] if before + 1 in found else len(text)
        joint = text[found[before][1] : stop]
        close = len(_shared_prefix(joint, ending[last[before][1] :])) if before in last else 0
        rest = self._body_tail_length(first, joint, close)
        close = max(rest, close)
        return Separator(joint[:rest], joint[rest:close], joint[close:])

    def _body_tail_length(self, kind: MessageKind, between: str, closing_stop: int) -> int:
        """How much of what follows a message's last text is still its body: in a reply, all that the model writes."""
        if kind.role != "assistant":
            return 0
        spoken_last = kind.has_content and not kind.num_calls
        stop = self.find_stop_token(between, 0, len(between))
        if stop == len(between):
            return 0 if spoken_last else closing_stop
        return stop if not spoken_last or not between[:stop].strip() else 0


def _shared_prefix(between: str, ending: str) -> str:
    """The beginning that two texts share, cut back to where no tag is left open."""
    shared = between[: common_text_prefix_length(between, ending)]
    if shared not in (between, ending):
        for opens, closes in ("<>", "[]"):
            if shared.rfind(opens) > shared.rfind(closes):
                shared = shared[: shared.rfind(opens)]
    return shared


def _example_conversation(first: MessageKind, second: MessageKind) -> tuple[int, list[Message]]:
    """A short conversation that holds both kinds in a row, and the index of the first."""
    question = Message("user", FILLER_TEXT)
    if first.role == "tool":
        caller, *results = MessageKind("assistant", num_calls=2 if second.role == "tool" else 1).example()
        lead, rest = [question, caller], results
    else:
        lead = [question] if first.role == "assistant" else []
        rest = first.example()
    if second.role == "tool":
        pair = rest[:2] if len(rest) > 1 else [rest[0], Message("tool", FILLER_TEXT, tool_call_id=CALL_ID)]
    elif second in (GENERATION_PROMPT, END_OF_CONVERSATION):
        pair = rest[:1]
    else:
        pair = [rest[0], *second.example()[:1]]
    return len(lead), [*lead, *pair]
