"""Formatting of samples as OpenAI choices: completions or chat messages, complete or as deltas of a stream.

This is all that the two OpenAI endpoints differ in. Everything else is shared, in `openai_api`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from ramify.infer.dialects.chat_format import format_message
from ramify.infer.dialects.message_parser import remove_prefill
from ramify.infer.request import RequestOutput, TopLogprobs
from ramify.model.render import RenderedPrompt, Renderer
from ramify.trace import Message

REPLACEMENT_CHAR = "\ufffd"  # what an incomplete character is decoded to
MAX_PENDING_TOKENS = 16  # tokens that are held back for one character; more are not the bytes of a character


class IncrementalDetokenizer:
    """Decodes token ids as they arrive. `text` is all text returned so far; `stopped` is set by a stop string.

    Text is held back while it ends in an incomplete character, or in what could be the beginning of a stop string. Text
    is final up to a token that ended on a complete character, and decoding starts there, so each step is cheap.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # tokens whose text is final
        self._decode_start = 0  # tokens before this one are not decoded again
        self._pending_text = ""

    def decode_new(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Add tokens and return the new text that is final. With `is_last` nothing is held back."""
        if self.stopped:
            return ""
        self._token_ids.extend(token_ids)
        old_text = self._decode(self._token_ids[self._decode_start : self._num_decoded])
        text = self._decode(self._token_ids[self._decode_start :])
        num_pending = len(self._token_ids) - self._num_decoded
        if is_last or not text.endswith(REPLACEMENT_CHAR) or num_pending > MAX_PENDING_TOKENS:
            self._pending_text += text[len(old_text) :]
            self._decode_start, self._num_decoded = self._num_decoded, len(self._token_ids)
        return self._release_text(is_last)

    def _release_text(self, is_last: bool) -> str:
        pending = self._pending_text
        stop_positions = [position for stop in self._stop_strings if (position := pending.find(stop)) >= 0]
        if stop_positions:
            self.stopped = True
            released, self._pending_text = pending[: min(stop_positions)], ""
        else:
            held_back = [0] if is_last else [0, *(_partial_stop_length(pending, stop) for stop in self._stop_strings)]
            end = len(pending) - max(held_back)
            released, self._pending_text = pending[:end], pending[end:]
        self.text += released
        return released


def _partial_stop_length(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


DecodeFn = Callable[[Sequence[int]], str]


def make_decoder(renderer: Renderer) -> DecodeFn:
    """Return a function from token ids to their text without special tokens."""
    return partial(renderer.tokenizer.decode, keep_special_tokens=False)


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
    num_shown_chars: int = 0  # characters of the tokens whose logprobs a stream has shown

    def append(self, output: RequestOutput) -> str:
        """Add an output; return the text that is certain to follow. A stop string ends the sample."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.prompt_top_logprobs += output.prompt_top_logprobs
        new_text = self.detokenizer.decode_new(output.token_ids, is_last=output.finish_reason is not None)
        self.finish_reason = "stop" if self.detokenizer.stopped else output.finish_reason
        return new_text


class ResponseFormatter(ABC):
    """The format of one endpoint.

    Ids of responses begin with `id_prefix`; the `object` field is `object_type`, or `chunk_object_type` in a stream.
    `prompt_logprobs_in_choice` says whether prompt logprobs are part of a choice or of the response. `decode` turns
    token ids into text.
    """

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]
    chunk_object_type: ClassVar[str]
    prompt_logprobs_in_choice: ClassVar[bool]

    def __init__(self, decode: DecodeFn) -> None:
        self.decode = decode

    @abstractmethod
    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        """Return the fields of a finished sample, with its finish reason."""

    @abstractmethod
    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the fields for an event of a stream."""

    @abstractmethod
    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs, start_char: int = 0
    ) -> dict[str, Any]:
        """Return the `logprobs` field for some tokens, which begin at a character of the text."""

    def select_shown_tokens(self, sample: StreamedSample) -> ShownTokens:
        """Return the tokens of a finished sample that have logprobs in the answer."""
        return ShownTokens(sample.token_ids, sample.logprobs, sample.top_logprobs)

    def count_shown_samples(self, sample: StreamedSample) -> int:
        """Return how many sampled tokens the answer shows."""
        return len(sample.token_ids)


class CompletionFormatter(ResponseFormatter):
    """The format of `/v1/completions`.

    With `echo` the answer begins with the prompt; with `only_prompt` it is the prompt, without the sampled token.
    """

    id_prefix: ClassVar[str] = "cmpl"
    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"
    prompt_logprobs_in_choice: ClassVar[bool] = True

    def __init__(self, decode: DecodeFn, *, echo: bool = False, only_prompt: bool = False) -> None:
        super().__init__(decode)
        self.echo, self.only_prompt = echo, only_prompt

    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        """Return the text of a sample, after its prompt if `echo` is set."""
        prompt = self.decode(sample.prompt_token_ids) if self.echo else ""
        if self.only_prompt:
            return {"text": prompt, "finish_reason": "length"}
        return {"text": prompt + sample.detokenizer.text, "finish_reason": sample.finish_reason}

    def select_shown_tokens(self, sample: StreamedSample) -> ShownTokens:
        """Return the sampled tokens, after the prompt's tokens if `echo` is set."""
        sampled = ShownTokens([], [], []) if self.only_prompt else super().select_shown_tokens(sample)
        if not self.echo:
            return sampled
        return ShownTokens(
            sample.prompt_token_ids + sampled.token_ids,
            [*sample.prompt_logprobs, *sampled.logprobs],
            sample.prompt_top_logprobs + (sampled.top_logprobs or [[] for _ in sampled.token_ids]),
        )

    def count_shown_samples(self, sample: StreamedSample) -> int:
        """Return the number of sampled tokens, 0 if only the prompt is shown."""
        return 0 if self.only_prompt else super().count_shown_samples(sample)

    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the new text of a sample."""
        return {"text": new_text, "finish_reason": sample.finish_reason}

    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs, start_char: int = 0
    ) -> dict[str, Any]:
        """Return tokens and logprobs as parallel lists, as the completions API does."""
        tokens = [self.decode([token_id]) for token_id in token_ids]
        return {
            "tokens": tokens,
            "text_offset": list(accumulate(map(len, tokens), initial=start_char))[:-1],
            "token_logprobs": logprobs,
            "top_logprobs": [self._format_alternatives(*row) for row in zip(token_ids, logprobs, top_logprobs)],
        }

    def _format_alternatives(
        self, token_id: int, logprob: float | None, alternatives: list[tuple[int, float]]
    ) -> dict[str, float] | None:
        """Return logprobs by text: of the likeliest tokens, and of the token itself. Of equal texts the first wins."""
        if logprob is None:
            return None
        by_text: dict[str, float] = {}
        for other, value in [*alternatives, (token_id, logprob)]:
            by_text.setdefault(self.decode([other]), value)
        return by_text


class ChatFormatter(ResponseFormatter):
    """The format of `/v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl"
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"
    prompt_logprobs_in_choice: ClassVar[bool] = False

    def __init__(self, renderer: Renderer, prompt: RenderedPrompt, *, has_tools: bool, prefill: str = "") -> None:
        super().__init__(make_decoder(renderer))
        self.renderer, self.prompt, self.has_tools, self.prefill = renderer, prompt, has_tools, prefill

    def format_choice(self, sample: StreamedSample) -> dict[str, Any]:
        """Return the message of a sample, with its tool calls parsed."""
        message = Message("assistant", sample.detokenizer.text)
        if not sample.detokenizer.stopped:
            message = remove_prefill(
                self.renderer.parse_after_prefill(sample.token_ids, self.prompt).message, self.prefill
            )
        called_tools = message.tool_calls and sample.finish_reason == "stop"
        finish_reason = "tool_calls" if called_tools else sample.finish_reason
        return {"message": format_message(message), "finish_reason": finish_reason}

    def format_delta(self, sample: StreamedSample, new_text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the new text of a sample as a change of its message. Text with tools is sent when it is complete."""
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if not self.has_tools:
            return {"delta": {**delta, "content": new_text}, "finish_reason": sample.finish_reason}
        if sample.finish_reason is None:  # only a complete call can be parsed, so a turn with tools is one delta
            return {"delta": delta, "finish_reason": None}
        choice = self.format_choice(sample)
        delta |= {key: value for key, value in choice["message"].items() if value}
        for index, call in enumerate(delta.get("tool_calls", [])):
            call.setdefault("index", index)
        return {"delta": delta, "finish_reason": choice["finish_reason"]}

    def format_logprobs(
        self, token_ids: list[int], logprobs: Sequence[float | None], top_logprobs: TopLogprobs, start_char: int = 0
    ) -> dict[str, Any]:
        """Return one entry per token, as the chat API does."""
        return {
            "content": [
                {
                    **self._format_token(token_id, logprob),
                    "top_logprobs": [self._format_token(*other) for other in alternatives],
                }
                for token_id, logprob, alternatives in zip(token_ids, logprobs, top_logprobs or [[]] * len(token_ids))
            ]
        }

    def _format_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
