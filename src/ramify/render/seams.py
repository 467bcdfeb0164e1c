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
from ramify.render.marks import Marks, common_prefix, extents
from ramify.render.outline import CALL_ID, FILLER, SYSTEM_ROLES, Kind
from ramify.render.writer import ANY_TOOL, Writer
from ramify.trace import Message

GENERATE = Kind("generation prompt")
NOTHING = Kind("nothing")


@dataclass(frozen=True, slots=True)
class Seam:
    """What stands between the last text of a message and the first of the next: `rest` + `after` + `opening`."""

    rest: str  # still the message's body: the end of its tool calls
    after: str
    opening: str

    @property
    def outside(self) -> str:
        """What stands between the two bodies."""
        return self.after + self.opening


class Seams:
    """The seams of one template."""

    def __init__(self, writer: Writer, stops: Sequence[str]) -> None:
        self._writer = writer
        self._stops = stops
        self._known = lru_cache(maxsize=1024)(self._find_any)

    def between(
        self, first: Kind, second: Kind, tools: Sequence[Mapping[str, Any]] = (), *, call_id: str | None = None
    ) -> Seam | None:
        """The seam of two kinds, or `GENERATE` or `NOTHING` as the second; None where the template will not tell.

        `call_id` is the first message's, for a template that shows it behind a tool's result.
        """
        seam = self._ask(first, second, tools)
        if seam is None and first.reasoning is not None:
            # The template hides the reasoning of an earlier turn, but the rest of the message stands as ever.
            seam = self._ask(first._replace(reasoning=None, content=first.content or not first.calls), second, tools)
        if seam is None or call_id is None:
            return seam
        return replace(seam, after=seam.after.replace(CALL_ID, self._writer.shown_id(call_id)))

    def first_stop(self, text: str, start: int, end: int) -> int:
        """Where the first stop token within [start, end) stands; `end` if there is none."""
        found = (text.find(stop, start, end) for stop in self._stops)
        return min((at for at in found if at >= 0), default=end)

    def _ask(self, first: Kind, second: Kind, tools: Sequence[Mapping[str, Any]]) -> Seam | None:
        if first.role in SYSTEM_ROLES and tools:
            return self._find(first, second, tools)  # many templates list the tools behind the system prompt
        return self._known(first, second, bool(tools))

    def _find_any(self, first: Kind, second: Kind, tools: bool) -> Seam | None:
        return self._find(first, second, [ANY_TOOL] if tools else [])

    def _find(self, first: Kind, second: Kind, tools: Sequence[Mapping[str, Any]]) -> Seam | None:
        before, conversation = _example(first, second)
        marks = Marks()
        marked = marks.mark(conversation, arguments=True)
        alone = marked[: before + 1]
        try:
            text = self._writer.text(marked, tools, generate=second == GENERATE)
        except TemplateRefused:
            return None
        try:
            ending = self._writer.text(alone, tools)
        except TemplateRefused:
            ending = ""
        found, last = extents(marks.slots(text)), extents(marks.slots(ending))
        if before not in found or (len(marked) > before + 1 and before + 1 not in found):
            return None
        stop = found[before + 1][0] if before + 1 in found else len(text)
        joint = text[found[before][1] : stop]
        close = len(_shared(joint, ending[last[before][1] :])) if before in last else 0
        rest = self._rest(first, joint, close)
        close = max(rest, close)
        return Seam(joint[:rest], joint[rest:close], joint[close:])

    def _rest(self, kind: Kind, joint: str, close: int) -> int:
        """How much of what follows a message's last text is still its body: in a reply, all that the model writes."""
        if kind.role != "assistant":
            return 0
        spoken_last = kind.content and not kind.calls
        stop = self.first_stop(joint, 0, len(joint))
        if stop == len(joint):
            return 0 if spoken_last else close
        return stop if not spoken_last or not joint[:stop].strip() else 0


def _shared(joint: str, ending: str) -> str:
    """The beginning that two texts share, cut back to where no tag is left open."""
    shared = joint[: common_prefix(joint, ending)]
    if shared not in (joint, ending):
        for opens, closes in ("<>", "[]"):
            if shared.rfind(opens) > shared.rfind(closes):
                shared = shared[: shared.rfind(opens)]
    return shared


def _example(first: Kind, second: Kind) -> tuple[int, list[Message]]:
    """A short conversation that holds both kinds in a row, and the index of the first."""
    question = Message("user", FILLER)
    if first.role == "tool":
        caller, *results = Kind("assistant", calls=2 if second.role == "tool" else 1).sample()
        lead, rest = [question, caller], results
    else:
        lead = [question] if first.role == "assistant" else []
        rest = first.sample()
    if second.role == "tool":
        pair = rest[:2] if len(rest) > 1 else [rest[0], Message("tool", FILLER, tool_call_id=CALL_ID)]
    elif second in (GENERATE, NOTHING):
        pair = rest[:1]
    else:
        pair = [rest[0], *second.sample()[:1]]
    return len(lead), [*lead, *pair]
