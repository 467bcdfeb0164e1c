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

from ramify.render.outline import ConversationOutline
from ramify.render.tokenizer import Int32Array, Tokenizer
from ramify.trace import Message, MessageSpan

ToolSchema = Mapping[str, Any]
"""A tool as the model is told about it: `{"type": "function", "function": {name, description, parameters}}`."""


class BreakReason(StrEnum):
    """Why earlier tokens could not be kept."""

    TOOLS_CHANGED = "tools_changed"  # the caller offers other tools than before
    REASONING_DROPPED = "reasoning_dropped"  # the template hides the thinking of an earlier turn
    GENERATION_PROMPT_DROPPED = "generation_prompt_dropped"  # ... or what the prompt itself opened
    HISTORY_REWRITTEN = "history_rewritten"  # ... or writes something else before the last turn: tools, system prompt
    REPLY_REWRITTEN = "reply_rewritten"  # ... or the reply
    UNCLEAR = "unclear"  # the template looks at what messages say, or the family gives no reason


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """The template rewrites history, so the prompt was rendered anew: a fork of the trace."""

    reason: BreakReason
    detail: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """What to add to a rollout's metrics."""
        return {"render/breaks": 1.0, f"render/breaks/{self.reason}": 1.0}


class ParseProblemKind(StrEnum):
    """What is wrong with a part of a reply."""

    INVALID_JSON = "invalid_json"
    NO_NAME = "no_name"
    BAD_ARGUMENTS = "bad_arguments"  # not a table of arguments
    UNCLOSED = "unclosed"  # the call never ends
    BAD_FORM = "bad_form"  # not what the format looks like
    UNCLOSED_REASONING = "unclosed_reasoning"


@dataclass(frozen=True, slots=True)
class ParseProblem:
    """A part of a reply that could not be read. Its text stays in the message's content."""

    kind: ParseProblemKind
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Sampled ids as a message. `body` is their part before the stop token."""

    message: Message
    content_span: tuple[int, int]
    problems: tuple[ParseProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt to sample from.

    `ids[:kept]` are the history's tokens as they were; `added` is what this rendering put behind them. `spans` are the
    messages rendered now, in tokens of `added`, and what follows the last of them is the generation prompt: together
    exactly what a `Turn` wants whose `after` is the last node of the history.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    token_ids: Int32Array
    spans: tuple[MessageSpan, ...]
    outline: ConversationOutline
    num_reused: int = 0
    prefix_break: PrefixBreak | None = None

    @property
    def new_token_ids(self) -> Int32Array:
        return self.token_ids[self.num_reused :]

    @property
    def generation_prompt_ids(self) -> Int32Array:
        """The generation prompt: what stands before the reply and belongs to it."""
        return self.new_token_ids[self.spans[-1].stop if self.spans else 0 :]

    def as_continuation(self, history: TokenHistory, prefix_break: PrefixBreak | None) -> RenderedPrompt:
        """This full render as the continuation of a history, all of whose tokens it keeps, or as a break with it."""
        kept = len(history.token_ids)
        if prefix_break is None and not np.array_equal(self.token_ids[:kept], history.token_ids):
            prefix_break = PrefixBreak(BreakReason.HISTORY_REWRITTEN)
        if prefix_break is not None:
            return replace(self, prefix_break=prefix_break)
        spans = (_shift_span(span, kept) for span in self.spans[len(history.messages) :])
        return replace(self, num_reused=kept, spans=tuple(spans))

    def with_reply(self, sampled_ids: npt.ArrayLike, parsed: ParsedReply) -> TokenHistory:
        """The history that ends in this reply, its ids verbatim."""
        reply = np.asarray(sampled_ids, np.int32)
        return TokenHistory(
            messages=(*self.messages, parsed.message),
            tools=self.tools,
            token_ids=np.concatenate([self.token_ids, reply]),
            num_sampled=len(reply),
            outline=self.outline.add(parsed.message),
        )


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """A conversation up to the end of a message, with the exact tokens that stand for it.

    The last `sampled` ids are a reply of the policy, stop token included if it came to one; 0 where the last message
    was part of a prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    token_ids: Int32Array
    num_sampled: int
    outline: ConversationOutline

    @classmethod
    def build(
        cls, messages: Sequence[Message], tools: Sequence[ToolSchema], token_ids: npt.ArrayLike, *, num_sampled: int = 0
    ) -> TokenHistory:
        """The history of a path in a trace: its messages and tokens, and how many its last node sampled."""
        return cls(
            tuple(messages),
            tuple(tools),
            np.asarray(token_ids, np.int32),
            num_sampled,
            ConversationOutline.from_messages(messages),
        )


def _shift_span(span: MessageSpan, offset: int) -> MessageSpan:
    low, high = span.body
    return MessageSpan(span.message, max(0, span.stop - offset), (max(0, low - offset), max(0, high - offset)))


class Renderer(Protocol):
    """Messages to token ids and back, for one model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a reply."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        """The whole conversation as a prompt; without `generate`, no generation prompt at its end."""
        ...

    def bridge(
        self, history: TokenHistory, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> RenderedPrompt:
        """The prompt that continues `history` with new messages.

        After a sampled reply its cost is in the new messages. Where the template rewrites history, all is rendered
        anew and `broke` says why. A history that ends in a prompt message is rendered anew and compared, so it is
        cheaper to bridge from the last reply. `tools` are those of the history unless given.
        """
        ...

    def parse(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        """The message that these ids, sampled after `prompt`, say."""
        ...
