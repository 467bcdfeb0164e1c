"""The HTTP bodies that the server accepts, and their conversion to engine requests.

Unknown fields are ignored, as in every OpenAI-compatible server: clients send many. A known field that would change the
answer and is not supported is rejected, never ignored.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import msgspec

from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.chat_format import UNSUPPORTED_FIELDS, check_supported
from ramify.infer.dialects.structured_output import parse_response_format
from ramify.infer.grammar import build_grammar
from ramify.infer.request import SamplingParams
from ramify.model.render.reply_grammar import build_json_rule

GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling fields that all endpoints have in common."""

    can_echo: ClassVar[bool] = False

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    # Known, and rejected unless they are off.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    best_of: int | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    functions: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    echo: bool = False
    suffix: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings. Raises RequestInvalid."""
        stop_strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not stop for stop in stop_strings):
            raise RequestInvalid("stop: an empty string would stop at once")
        return stop_strings

    @property
    def num_samples(self) -> int:
        """The number of samples. Raises RequestInvalid."""
        num_samples = 1 if self.n is None else self.n
        if not 1 <= num_samples <= 128:
            raise RequestInvalid(f"n: expected 1 to 128, got {num_samples}")
        return num_samples

    def to_sampling_params(
        self, *, eos_ids: Iterable[int], max_tokens: int, top_logprobs: int = 0, sample_index: int = 0
    ) -> SamplingParams:
        """Return the engine's sampling parameters; `sample_index` gives each sample of a request its own seed."""
        self._reject_unsupported()
        stop_ids = frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else frozenset(eos_ids))
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None else self.top_k,
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=None if self.seed is None else self.seed + 0x9E3779B97F4A7C15 * sample_index,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            logit_bias=tuple((_parse_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            top_logprobs=top_logprobs,
            prompt_logprobs=self.prompt_logprobs is not None,
        )

    def build_grammar(self) -> str | None:
        """Return the grammar that the reply must follow; None if there is none. Raises RequestInvalid."""
        return None if self.structured_outputs is None else build_grammar(self.structured_outputs)

    def _reject_unsupported(self) -> None:
        check_supported({name: getattr(self, name) for name in UNSUPPORTED_FIELDS})
        off = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
        for name, neutral in off.items():
            if getattr(self, name) not in (None, neutral):
                raise RequestInvalid(f"{name}: only {neutral} is supported, got {getattr(self, name)}")
        for name in GUIDED_FIELDS:
            if getattr(self, name) is not None:
                raise RequestInvalid(f"{name}: not supported; send response_format or structured_outputs")
        if self.suffix or (self.echo and not self.can_echo):
            raise RequestInvalid(f"{'suffix' if self.suffix else 'echo'}: not supported here")
        self._check_prompt_logprobs()

    def _check_prompt_logprobs(self) -> None:
        if self.prompt_logprobs not in (None, 0, 1):
            raise RequestInvalid(
                f"prompt_logprobs: {self.prompt_logprobs} is not supported; use 0 or 1 (the prompt's own tokens)"
            )


class GenerateSamplingFields(SamplingFields, kw_only=True):
    """The `sampling_params` of the generate endpoint. `logprobs_start` is the first token with a prompt logprob."""

    logprobs: int | None = None
    logprobs_start: int = 0

    def to_sampling_params(
        self, *, eos_ids: Iterable[int], max_tokens: int, top_logprobs: int = 0, sample_index: int = 0
    ) -> SamplingParams:
        """Return the engine's sampling parameters; `prompt_logprobs` above 1 asks for that many likeliest tokens."""
        params = super().to_sampling_params(
            eos_ids=eos_ids, max_tokens=max_tokens, top_logprobs=top_logprobs, sample_index=sample_index
        )
        num_top = 0 if self.prompt_logprobs in (None, 1) else self.prompt_logprobs
        return replace(params, logprobs_start=self.logprobs_start, prompt_top_logprobs=num_top)

    def _check_prompt_logprobs(self) -> None:
        if self.logprobs_start and self.prompt_logprobs is None:
            raise RequestInvalid("logprobs_start: it needs prompt_logprobs, the logprobs that begin there")


class ImageFields(msgspec.Struct, kw_only=True):
    """An image of a prompt: the hash of an uploaded image, and the prompt tokens [start, stop) that stand for it."""

    hash: str
    start: int
    stop: int


class GenerateBody(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: GenerateSamplingFields = msgspec.field(default_factory=GenerateSamplingFields)
    flat_logprobs: bool = False
    request_id: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0
    images: list[ImageFields] = msgspec.field(default_factory=list[ImageFields])


class OpenAIBody(SamplingFields, kw_only=True):
    """The fields that both OpenAI endpoints have in common."""

    model: str | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0

    def _reject_unsupported(self) -> None:
        super()._reject_unsupported()
        for name, is_set in (("echo", self.echo), ("prompt_logprobs", self.prompt_logprobs is not None)):
            if self.stream and is_set:
                raise RequestInvalid(f"{name}: not supported in a stream; ask with stream = false")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with an event that holds the usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))


class CompletionBody(OpenAIBody, kw_only=True):
    """`POST /v1/completions`."""

    can_echo: ClassVar[bool] = True
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    def build_grammar(self) -> str | None:
        """Return the grammar of `structured_outputs` or `response_format`. Raises RequestInvalid."""
        schema, is_strict = parse_response_format(self.response_format, "response_format")
        if schema is None:
            return super().build_grammar()
        return f"start: {build_json_rule(schema, is_strict=is_strict)}"


class ChatImageUrl(TypedDict):
    """The data URL of an image."""

    url: str


class ChatContentPart(TypedDict):
    """A part of a message's content: a text or an image."""

    type: Literal["text", "image_url"]
    text: NotRequired[str | None]
    image_url: NotRequired[ChatImageUrl]


class ChatFunctionCall(TypedDict):
    """The function of a tool call."""

    name: str
    arguments: NotRequired[str]


class ChatToolCall(TypedDict):
    """A tool call of an earlier reply."""

    id: NotRequired[str | None]
    function: ChatFunctionCall


class ChatMessage(TypedDict, total=False):
    """A message of a conversation; `ramify.infer.dialects` checks its role."""

    role: Any
    content: str | list[ChatContentPart] | None
    reasoning_content: str | None
    tool_calls: list[ChatToolCall] | None
    tool_call_id: str | None
    function_call: ChatFunctionCall | None
    name: str | None


class ChatFunction(TypedDict):
    """The function of a tool."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class ChatTool(TypedDict):
    """A tool that the model may call."""

    function: ChatFunction


class ChatBody(OpenAIBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]


class PauseBody(msgspec.Struct):
    """`POST /pause`."""

    mode: str = "keep"


class UpdateWeightsBody(msgspec.Struct):
    """`POST /update_weights`: a published directory, and whether running requests keep their keys and values.

    `run` identifies the run whose trainer published them: weights of an older trainer of the same run are refused.
    """

    path: str
    kv: str = "recompute"
    run: str = ""


def _parse_token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise RequestInvalid(f"logit_bias: expected token ids as keys, got {key!r}") from None
