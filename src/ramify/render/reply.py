"""From sampled ids to a message: stop token off, reasoning apart, tool calls read.

Reasoning ends at its closing tag, wherever it was opened: by the model, or already by the generation prompt. Calls are
only looked for behind it, so that a model may think about a call without making it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ramify.render.calls import Format
from ramify.render.conversation import Parsed, Problem, ProblemKind, Rendered
from ramify.render.tokenizer import Ints, Tokenizer
from ramify.render.writer import ReasoningTags
from ramify.trace import Message, ToolCall


class ReplyReader:
    """Reads the replies of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        tags: ReasoningTags,
        format: Format,
        margins: tuple[str, str] = ("", ""),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._tags = tags
        self._format = format
        self._margins = margins

    def read(self, sampled: Ints, prompt: Rendered) -> Parsed:
        stop = len(sampled) - (len(sampled) > 0 and int(sampled[-1]) in self._stop_ids)
        before, behind = self._margins
        text = self._tokenizer.decode(sampled[:stop]).removeprefix(before).removesuffix(behind)
        opened = self._is_open(self._tokenizer.decode(prompt.opening))
        reasoning, said, closed = split_reasoning(text, self._tags, opened)
        reading = self._format(said, prompt.tools)
        problems = list(reading.problems)
        if not closed:
            problems.append(Problem(ProblemKind.UNCLOSED_REASONING, reasoning or "", "the reply ends while thinking"))
        ids = CallIds(sampled, len(prompt.messages))
        calls = tuple(
            ToolCall(call.id or ids.make(number), call.name, call.arguments)
            for number, call in enumerate(reading.calls)
        )
        message = Message("assistant", reading.content, reasoning, calls)
        return Parsed(message, (0, stop), tuple(problems))

    def _is_open(self, text: str) -> bool:
        return text.rfind(self._tags.start) > text.rfind(self._tags.stop)


def split_reasoning(text: str, tags: ReasoningTags, opened: bool) -> tuple[str | None, str, bool]:
    """The reasoning, what is said after it, and whether the reasoning came to an end."""
    inside = text if opened else text.lstrip()
    if not opened:
        if not inside.startswith(tags.start):
            return None, text, True
        inside = inside.removeprefix(tags.start)
    thought, tag, said = inside.removeprefix(tags.start if opened else "").partition(tags.stop)
    return thought.strip("\n"), said.lstrip("\n"), bool(tag)


class CallIds:
    """Makes the ids for the calls of one reply: nine letters and digits, as the strictest template requires.

    An id is a digest of the reply's tokens, the turn and the number of the call. The tokens are digested once, so that
    the time for a reply with many calls is linear in its length.
    """

    def __init__(self, sampled: Ints, turn: int) -> None:
        self._digest = hashlib.sha256(sampled.tobytes())
        self._digest.update(b" %d " % turn)

    def make(self, number: int) -> str:
        """Return the id of call `number`."""
        digest = self._digest.copy()
        digest.update(b"%d" % number)
        return digest.hexdigest()[:9]
