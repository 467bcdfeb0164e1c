"""The template text between two messages, split into what closes the first and what opens the second.

It is derived once per pair of message kinds. A message rendered last is followed only by its closing text; a message
rendered before another one, by closing and opening text. The common prefix of both is the closing text. The same
comparison finds the end of a reply with tool calls, whose text cannot be replaced by a sentinel.

    user       <|im_end|>\\n   <|im_start|>assistant\\n
               closing         opening
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ramify.core.errors import TemplateRefused
from ramify.model.render.outline import CALL_ID, FILLER_TEXT, SYSTEM_ROLES, MessageKind
from ramify.model.render.sentinels import Sentinels, common_text_prefix_length, message_extents
from ramify.model.render.template_adapter import PROBE_TOOL, TemplateAdapter
from ramify.trace import Message

GENERATION_PROMPT = MessageKind("generation prompt")
END_OF_CONVERSATION = MessageKind("nothing")


@dataclass(frozen=True, slots=True)
class Separator:
    """The text between two message texts: `body_tail` + `closing` + `opening`."""

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
