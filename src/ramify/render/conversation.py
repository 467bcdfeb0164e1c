"""What a renderer gives and takes back: a prompt, the reply read from it, the history that a next turn continues.

The one idea: **tokens are history, messages only describe it.** A `Rendered` prompt is sampled from, `answered` joins
it with the sampled ids exactly as they are, and `bridge` appends what new messages add. Nothing that the engine saw or
sampled is ever tokenized a second time, unless the template itself rewrites it, and then a `Break` says why.

    prompt = renderer.render(messages, tools)              Rendered
    parsed = renderer.parse(sampled, prompt)               Parsed
    history = prompt.answered(sampled, parsed)             History
    prompt = renderer.bridge(history, tool_results)        Rendered, whose first `kept` ids are the history's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ramify.render.outline import Outline
from ramify.render.tokenizer import Ints, Tokenizer
from ramify.trace import Message, MessageSpan

Tool = Mapping[str, Any]
"""A tool as the model is told about it: `{"type": "function", "function": {name, description, parameters}}`."""


class Reason(StrEnum):
    """Why earlier tokens could not be kept."""

    TOOLS_CHANGED = "tools_changed"  # the caller offers other tools than before
    REASONING_DROPPED = "reasoning_dropped"  # the template hides the thinking of an earlier turn
    GENERATION_PROMPT_DROPPED = "generation_prompt_dropped"  # ... or what the prompt itself opened
    HISTORY_REWRITTEN = "history_rewritten"  # ... or writes something else before the last turn: tools, system prompt
    REPLY_REWRITTEN = "reply_rewritten"  # ... or the reply
    UNCLEAR = "unclear"  # the template looks at what messages say, or the family gives no reason


@dataclass(frozen=True, slots=True)
class Break:
    """The template rewrites history, so the prompt was rendered anew: a fork of the trace."""

    reason: Reason
    detail: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """What to add to a rollout's metrics."""
        return {"render/breaks": 1.0, f"render/breaks/{self.reason}": 1.0}


class ProblemKind(StrEnum):
    """What is wrong with a part of a reply."""

    INVALID_JSON = "invalid_json"
    NO_NAME = "no_name"
    BAD_ARGUMENTS = "bad_arguments"  # not a table of arguments
    UNCLOSED = "unclosed"  # the call never ends
    BAD_FORM = "bad_form"  # not what the format looks like
    UNCLOSED_REASONING = "unclosed_reasoning"


@dataclass(frozen=True, slots=True)
class Problem:
    """A part of a reply that could not be read. Its text stays in the message's content."""

    kind: ProblemKind
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Sampled ids as a message. `body` is their part before the stop token."""

    message: Message
    body: tuple[int, int]
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt to sample from.

    `ids[:kept]` are the history's tokens as they were; `added` is what this rendering put behind them. `spans` are the
    messages rendered now, in tokens of `added`, and what follows the last of them is the generation prompt: together
    exactly what a `Turn` wants whose `after` is the last node of the history.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    ids: Ints
    spans: tuple[MessageSpan, ...]
    outline: Outline
    kept: int = 0
    broke: Break | None = None

    @property
    def added(self) -> Ints:
        return self.ids[self.kept :]

    @property
    def opening(self) -> Ints:
        """The generation prompt: what stands before the reply and belongs to it."""
        return self.added[self.spans[-1].stop if self.spans else 0 :]

    def continuing(self, history: History, broke: Break | None) -> Rendered:
        """This full render as the continuation of a history, all of whose tokens it keeps, or as a break with it."""
        kept = len(history.ids)
        if broke is None and not np.array_equal(self.ids[:kept], history.ids):
            broke = Break(Reason.HISTORY_REWRITTEN)
        if broke is not None:
            return replace(self, broke=broke)
        spans = (_earlier(span, kept) for span in self.spans[len(history.messages) :])
        return replace(self, kept=kept, spans=tuple(spans))

    def answered(self, sampled: npt.ArrayLike, parsed: Parsed) -> History:
        """The history that ends in this reply, its ids verbatim."""
        reply = np.asarray(sampled, np.int32)
        return History(
            messages=(*self.messages, parsed.message),
            tools=self.tools,
            ids=np.concatenate([self.ids, reply]),
            sampled=len(reply),
            outline=self.outline.add(parsed.message),
        )


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to the end of a message, with the exact tokens that stand for it.

    The last `sampled` ids are a reply of the policy, stop token included if it came to one; 0 where the last message
    was part of a prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    ids: Ints
    sampled: int
    outline: Outline

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool], ids: npt.ArrayLike, *, sampled: int = 0) -> History:
        """The history of a path in a trace: its messages and tokens, and how many its last node sampled."""
        return cls(tuple(messages), tuple(tools), np.asarray(ids, np.int32), sampled, Outline.of(messages))


def _earlier(span: MessageSpan, by: int) -> MessageSpan:
    low, high = span.body
    return MessageSpan(span.message, max(0, span.stop - by), (max(0, low - by), max(0, high - by)))


class Renderer(Protocol):
    """Messages to token ids and back, for one model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a reply."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = True) -> Rendered:
        """The whole conversation as a prompt; without `generate`, no generation prompt at its end."""
        ...

    def bridge(self, history: History, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Rendered:
        """The prompt that continues `history` with new messages.

        After a sampled reply its cost is in the new messages. Where the template rewrites history, all is rendered
        anew and `broke` says why. A history that ends in a prompt message is rendered anew and compared, so it is
        cheaper to bridge from the last reply. `tools` are those of the history unless given.
        """
        ...

    def parse(self, sampled: npt.ArrayLike, prompt: Rendered) -> Parsed:
        """The message that these ids, sampled after `prompt`, say."""
        ...
