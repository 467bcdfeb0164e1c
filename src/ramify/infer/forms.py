"""How a sample is written down for people: as a text, or as a message of a conversation, whole or in parts.

This is all that the two endpoints in OpenAI's shape differ in. Everything else is done once, in `openai`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ramify.infer.rendering import ChatRenderer, Prompt
from ramify.infer.request import Completion
from ramify.infer.text import TextStream

Decode = Callable[[Sequence[int]], str]
Rivals = list[list[tuple[int, float]]]


@dataclass(slots=True)
class Sample:
    """One sample as it grows."""

    prompt: list[int]
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: Rivals = field(default_factory=list)
    finish: str | None = None

    def take(self, part: Completion) -> str:
        """Add a part; the text it is certain to add. A stop string ends the sample."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top += part.top
        new = self.text.feed(part.tokens, last=part.finish is not None)
        self.finish = "stop" if self.text.stopped else part.finish
        return new


class Form(Protocol):
    """One way to write samples down. An answer is an `object`, its parts are `chunk`s."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk: ClassVar[str]

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

    def logprobs(self, tokens: list[int], logprobs: list[float], top: Rivals) -> dict[str, Any]:
        """The logprobs of some of its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TextForm:
    """`/v1/completions`."""

    prefix: ClassVar[str] = "cmpl"
    object: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    decode: Decode

    def whole(self, sample: Sample) -> dict[str, Any]:
        return {"text": sample.text.text, "finish_reason": sample.finish}

    def part(self, sample: Sample, new: str, *, first: bool) -> dict[str, Any]:
        return {"text": new, "finish_reason": sample.finish}

    def logprobs(self, tokens: list[int], logprobs: list[float], top: Rivals) -> dict[str, Any]:
        spelled = [{self.decode([other]): value for other, value in row} for row in top]
        return {
            "tokens": [self.decode([token]) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": spelled,
        }


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`/v1/chat/completions`."""

    prefix: ClassVar[str] = "chatcmpl"
    object: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

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

    def logprobs(self, tokens: list[int], logprobs: list[float], top: Rivals) -> dict[str, Any]:
        return {
            "content": [
                {**self._spelled(token, logprob), "top_logprobs": [self._spelled(*other) for other in row]}
                for token, logprob, row in zip(tokens, logprobs, top or [[]] * len(tokens))
            ]
        }

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
