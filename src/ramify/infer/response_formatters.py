"""How a sample is written down for people: as a text, or as a message of a conversation, whole or in parts.

This is all that the two endpoints in OpenAI's shape differ in. Everything else is done once, in `openai`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from ramify.infer.chat_renderer import ChatPrompt, ChatRenderer
from ramify.infer.detokenizer import IncrementalDetokenizer
from ramify.infer.request import RequestOutput

DecodeFn = Callable[[Sequence[int]], str]
TopLogprobs = list[list[tuple[int, float]]]


class ShownTokens(NamedTuple):
    """Tokens that an answer shows with logprobs and the likeliest alternatives; the first of a prompt has neither."""

    token_ids: list[int]
    logprobs: list[float] | list[float | None]
    top_logprobs: TopLogprobs


@dataclass(slots=True)
class StreamedSample:
    """One sample as it grows."""

    prompt_token_ids: list[int]
    detokenizer: IncrementalDetokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: TopLogprobs = field(default_factory=list)
    finish_reason: str | None = None

    def append(self, output: RequestOutput) -> str:
        """Add a part; the text it is certain to add. A stop string ends the sample."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.prompt_top_logprobs += output.prompt_top_logprobs
        new = self.detokenizer.decode_new(output.token_ids, is_last=output.finish_reason is not None)
        self.finish_reason = "stop" if self.detokenizer.stopped else output.finish_reason
        return new


class ResponseFormatter(Protocol):
    """One way to write samples down. An answer is an `object`, its parts are `chunk`s."""

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]
    chunk_object_type: ClassVar[str]
    prompt_logprobs_in_choice: ClassVar[bool]

    @property
    def decode(self) -> DecodeFn:
        """Token ids as text."""
        ...

    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        """A sample that has finished, with its finish reason."""
        ...

    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        """What a sample has grown by."""
        ...

    def select_shown_tokens(self, sample: StreamedSample) -> ShownTokens:
        """Return the tokens of a finished sample that have logprobs in the answer."""
        ...

    def count_shown_samples(self, sample: StreamedSample) -> int:
        """Return how many sampled tokens the answer shows."""
        ...

    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs
    ) -> dict[str, Any]:
        """The logprobs of some of its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionFormatter:
    """`/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl"
    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"
    prompt_logprobs_in_choice: ClassVar[bool] = True

    decode: DecodeFn
    echo: bool = False
    """Whether the answer begins with the prompt."""
    only_prompt: bool = False
    """Whether the answer is nothing but the prompt: the sampled token is left out."""

    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        prompt = self.decode(sample.prompt_token_ids) if self.echo else ""
        if self.only_prompt:
            return {"text": prompt, "finish_reason": "length"}
        return {"text": prompt + sample.detokenizer.text, "finish_reason": sample.finish_reason}

    def select_shown_tokens(self, sample: StreamedSample) -> ShownTokens:
        sampled = (
            ShownTokens([], [], [])
            if self.only_prompt
            else ShownTokens(sample.token_ids, sample.logprobs, sample.top_logprobs)
        )
        if not self.echo:
            return sampled
        return ShownTokens(
            sample.prompt_token_ids + sampled.token_ids,
            [*sample.prompt_logprobs, *sampled.logprobs],
            sample.prompt_top_logprobs + (sampled.top_logprobs or [[] for _ in sampled.token_ids]),
        )

    def count_shown_samples(self, sample: StreamedSample) -> int:
        return 0 if self.only_prompt else len(sample.token_ids)

    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        return {"text": new_text, "finish_reason": sample.finish_reason}

    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs
    ) -> dict[str, Any]:
        spelled = [self._format_alternatives(*row) for row in zip(token_ids, logprobs, top_logprobs)]
        return {
            "tokens": [self.decode([token]) for token in token_ids],
            "token_logprobs": logprobs,
            "top_logprobs": spelled,
        }

    def _format_alternatives(
        self, token_id: int, logprob: float | None, alternatives: list[tuple[int, float]]
    ) -> dict[str, float] | None:
        """Return logprobs by text: of the likeliest tokens, and of the token itself. Of equal texts the first wins."""
        if logprob is None:
            return None
        rivals: dict[str, float] = {}
        for other, value in [*alternatives, (token_id, logprob)]:
            rivals.setdefault(self.decode([other]), value)
        return rivals


@dataclass(frozen=True, slots=True)
class ChatFormatter:
    """`/v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl"
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"
    prompt_logprobs_in_choice: ClassVar[bool] = False

    renderer: ChatRenderer
    prompt: ChatPrompt
    has_tools: bool

    @property
    def decode(self) -> DecodeFn:
        return self.renderer.decode

    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        if sample.detokenizer.stopped:
            said: dict[str, Any] = {"content": sample.detokenizer.text}
        else:
            said = self.renderer.parse(sample.token_ids, self.prompt)
        finish = "tool_calls" if said.get("tool_calls") and sample.finish_reason == "stop" else sample.finish_reason
        return {"message": {"role": "assistant", **said}, "finish_reason": finish}

    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if not self.has_tools:
            return {"delta": {**delta, "content": new_text}, "finish_reason": sample.finish_reason}
        if (
            sample.finish_reason is None
        ):  # a call can only be read when it is whole, so a turn with tools comes in one part
            return {"delta": delta, "finish_reason": None}
        whole = self.format_choice(sample)
        delta |= {key: value for key, value in whole["message"].items() if value}
        for number, call in enumerate(delta.get("tool_calls", [])):
            call.setdefault("index", number)
        return {"delta": delta, "finish_reason": whole["finish_reason"]}

    def select_shown_tokens(self, sample: StreamedSample) -> ShownTokens:
        return ShownTokens(sample.token_ids, sample.logprobs, sample.top_logprobs)

    def count_shown_samples(self, sample: StreamedSample) -> int:
        return len(sample.token_ids)

    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs
    ) -> dict[str, Any]:
        return {
            "content": [
                {**self._format_token(token, logprob), "top_logprobs": [self._format_token(*other) for other in row]}
                for token, logprob, row in zip(token_ids, logprobs, top_logprobs or [[]] * len(token_ids))
            ]
        }

    def _format_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
