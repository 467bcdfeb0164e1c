"""How a sample is written down for people: as a text, or as a message of a conversation, whole or in parts.

This is all that the two endpoints in OpenAI's shape differ in. Everything else is done once, in `openai`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from ramify.infer.rendering import ChatRenderer, Prompt
from ramify.infer.request import Completion
from ramify.infer.text import TextStream

Decode = Callable[[Sequence[int]], str]
Rivals = list[list[tuple[int, float]]]


class ShownTokens(NamedTuple):
    """Tokens that an answer shows with logprobs and the likeliest alternatives; the first of a prompt has neither."""

    tokens: list[int]
    logprobs: list[float] | list[float | None]
    top: Rivals


@dataclass(slots=True)
class Sample:
    """One sample as it grows."""

    prompt: list[int]
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: Rivals = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: Rivals = field(default_factory=list)
    finish: str | None = None

    def take(self, part: Completion) -> str:
        """Add a part; the text it is certain to add. A stop string ends the sample."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top += part.top
        self.prompt_logprobs += part.prompt_logprobs
        self.prompt_top += part.prompt_top
        new = self.text.feed(part.tokens, last=part.finish is not None)
        self.finish = "stop" if self.text.stopped else part.finish
        return new


class Form(Protocol):
    """One way to write samples down. An answer is an `object`, its parts are `chunk`s."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk: ClassVar[str]
    prompt_logprobs_in_choice: ClassVar[bool]

    @property
    def decode(self) -> Decode:
        """Token ids as text."""
        ...

    def whole(self, sample: Sample) -> dict[str, Any]:
        """A sample that has finished, with its finish reason."""
        ...

    def part(self, sample: Sample, new: str, *, first: bool) -> dict[str, Any]:
        """What a sample has grown by."""
        ...

    def shown_tokens(self, sample: Sample) -> ShownTokens:
        """Return the tokens of a finished sample that have logprobs in the answer."""
        ...

    def count_sampled(self, sample: Sample) -> int:
        """Return how many sampled tokens the answer shows."""
        ...

    def logprobs(self, tokens: list[int], logprobs: Sequence[float | None], top: Rivals) -> dict[str, Any]:
        """The logprobs of some of its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TextForm:
    """`/v1/completions`."""

    prefix: ClassVar[str] = "cmpl"
    object: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"
    prompt_logprobs_in_choice: ClassVar[bool] = True

    decode: Decode
    echo: bool = False
    """Whether the answer begins with the prompt."""
    only_prompt: bool = False
    """Whether the answer is nothing but the prompt: the sampled token is left out."""

    def whole(self, sample: Sample) -> dict[str, Any]:
        prompt = self.decode(sample.prompt) if self.echo else ""
        if self.only_prompt:
            return {"text": prompt, "finish_reason": "length"}
        return {"text": prompt + sample.text.text, "finish_reason": sample.finish}

    def shown_tokens(self, sample: Sample) -> ShownTokens:
        sampled = (
            ShownTokens([], [], []) if self.only_prompt else ShownTokens(sample.tokens, sample.logprobs, sample.top)
        )
        if not self.echo:
            return sampled
        return ShownTokens(
            sample.prompt + sampled.tokens,
            [*sample.prompt_logprobs, *sampled.logprobs],
            sample.prompt_top + (sampled.top or [[] for _ in sampled.tokens]),
        )

    def count_sampled(self, sample: Sample) -> int:
        return 0 if self.only_prompt else len(sample.tokens)

    def part(self, sample: Sample, new: str, *, first: bool) -> dict[str, Any]:
        return {"text": new, "finish_reason": sample.finish}

    def logprobs(self, tokens: list[int], logprobs: Sequence[float | None], top: Rivals) -> dict[str, Any]:
        spelled = [self._rivals(*row) for row in zip(tokens, logprobs, top)]
        return {
            "tokens": [self.decode([token]) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": spelled,
        }

    def _rivals(self, token: int, logprob: float | None, row: list[tuple[int, float]]) -> dict[str, float] | None:
        """Return logprobs by text: of the likeliest tokens, and of the token itself. Of equal texts the first wins."""
        if logprob is None:
            return None
        rivals: dict[str, float] = {}
        for other, value in [*row, (token, logprob)]:
            rivals.setdefault(self.decode([other]), value)
        return rivals


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`/v1/chat/completions`."""

    prefix: ClassVar[str] = "chatcmpl"
    object: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"
    prompt_logprobs_in_choice: ClassVar[bool] = False

    renderer: ChatRenderer
    prompt: Prompt
    tools: bool

    @property
    def decode(self) -> Decode:
        return self.renderer.decode

    def whole(self, sample: Sample) -> dict[str, Any]:
        if sample.text.stopped:
            said: dict[str, Any] = {"content": sample.text.text}
        else:
            said = self.renderer.parse(sample.tokens, self.prompt)
        finish = "tool_calls" if said.get("tool_calls") and sample.finish == "stop" else sample.finish
        return {"message": {"role": "assistant", **said}, "finish_reason": finish}

    def part(self, sample: Sample, new: str, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if not self.tools:
            return {"delta": {**delta, "content": new}, "finish_reason": sample.finish}
        if sample.finish is None:  # a call can only be read when it is whole, so a turn with tools comes in one part
            return {"delta": delta, "finish_reason": None}
        whole = self.whole(sample)
        delta |= {key: value for key, value in whole["message"].items() if value}
        for number, call in enumerate(delta.get("tool_calls", [])):
            call.setdefault("index", number)
        return {"delta": delta, "finish_reason": whole["finish_reason"]}

    def shown_tokens(self, sample: Sample) -> ShownTokens:
        return ShownTokens(sample.tokens, sample.logprobs, sample.top)

    def count_sampled(self, sample: Sample) -> int:
        return len(sample.tokens)

    def logprobs(self, tokens: list[int], logprobs: Sequence[float | None], top: Rivals) -> dict[str, Any]:
        return {
            "content": [
                {**self._spelled(token, logprob), "top_logprobs": [self._spelled(*other) for other in row]}
                for token, logprob, row in zip(tokens, logprobs, top or [[]] * len(tokens))
            ]
        }

    def _spelled(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
