"""The generate endpoint: the request body, and the part of the response that is read.

The native engine and vLLM share its format, except that each reports the versions of the tokens in its own way.
Responses are decoded into types, so a server that sends something else fails here, with an error that names it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ramify.core.errors import EngineIncompatible, ProviderError, RequestInvalid
from ramify.infer.client.completion import ClientSampling, FinishReason
from ramify.model.images import ProcessedImage
from ramify.trace import Usage
from ramify.trace.annotation import TOP_DTYPE
from ramify.trace.columns import StructuredArray

GENERATE_PATH = "/inference/v1/generate"
IMAGES_PATH = "/inference/v1/images"
TOKEN_ID_LIMIT = 2**31  # token ids are stored in 32 bits
MAX_ABS_LOGPROB = float(np.finfo(np.float32).max)  # logprobs are stored and trained as float32
MAX_EXCERPT_CHARS = 200

T = TypeVar("T")


class RequestImage(Struct, frozen=True):
    """An image of a prompt: its placeholder tokens are [start, stop) of the prompt.

    `load` waits for the processed image; it is called only if a server does not have the image yet.
    """

    hash: str
    start: int
    stop: int
    load: Callable[[], Awaitable[ProcessedImage]]


class GenerateRequest(Struct, frozen=True):
    """A request for one sample."""

    prompt_ids: Sequence[int]
    sampling: ClientSampling
    priority: int = 0
    cache_salt: str | None = None
    images: Sequence[RequestImage] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the request; optional fields with their default are omitted."""
        token_ids = self.prompt_ids.tolist() if isinstance(self.prompt_ids, np.ndarray) else list(self.prompt_ids)
        fields: dict[str, Any] = {"token_ids": token_ids, "sampling_params": self.sampling.to_dict()}
        if self.priority:
            fields["priority"] = self.priority
        if self.cache_salt:
            fields["cache_salt"] = self.cache_salt
        if self.images:
            fields["images"] = [{"hash": image.hash, "start": image.start, "stop": image.stop} for image in self.images]
        return fields


class TokenLogprob(Struct, gc=False):
    """The logprob of one sampled token and, if requested, of the most likely tokens."""

    logprob: float
    top_logprobs: list[dict[str, Any]] = []


class ChoiceLogprobs(Struct):
    """The logprobs of a choice."""

    content: list[TokenLogprob] | None = None


class WeightVersionSpan(Struct):
    """Tokens [start, end) came from the weights with this label, as vLLM reports it."""

    version: str
    start: int
    end: int


class GenerateChoice(Struct):
    """One sample. `flat_logprobs` and `policy_versions` come from the native engine, `weight_versions` from vLLM."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    flat_logprobs: list[float] | None = None
    policy_versions: list[tuple[str, int, int, int]] | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class PromptTokensDetails(Struct):
    """The number of prompt tokens that were in the server's cache."""

    cached_tokens: int | None = None


class UsageInfo(Struct):
    """The token counts that the server reports, as far as they are read."""

    prompt_tokens_details: PromptTokensDetails | None = None


class GenerateResponse(Struct):
    """The body of a response."""

    choices: list[GenerateChoice]
    usage: UsageInfo | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def decode_json(data: bytes | str, body_type: type[T], server: str) -> T:
    """Decode a body as `body_type`. Raises ProviderError with an excerpt of the body."""
    try:
        return msgspec.json.decode(data, type=body_type)
    except msgspec.DecodeError as error:
        excerpt = data[:MAX_EXCERPT_CHARS]
        text = excerpt if isinstance(excerpt, str) else excerpt.decode("utf-8", "replace")
        raise ProviderError(f"{server} sent an unexpected response ({error}): {text}") from error


def get_only_choice(response: GenerateResponse, server: str) -> GenerateChoice:
    """Return the choice of a response that must have exactly one. Raises ProviderError."""
    if len(response.choices) != 1:
        raise ProviderError(f"{server} returned {len(response.choices)} choices, expected 1")
    return response.choices[0]


def get_sampled_tokens(choice: GenerateChoice, server: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the sampled token ids and their logprobs.

    Raises EngineIncompatible if the server sends none, and ProviderError if they are not usable for training.
    """
    logprobs = choice.flat_logprobs
    if logprobs is None and choice.logprobs is not None and choice.logprobs.content is not None:
        logprobs = [entry.logprob for entry in choice.logprobs.content]
    if choice.token_ids is None or logprobs is None:
        raise EngineIncompatible(f"{server} sent a response without token ids and logprobs")
    if len(logprobs) != len(choice.token_ids):
        raise ProviderError(f"{server} returned {len(choice.token_ids)} tokens with {len(logprobs)} logprobs")
    if choice.token_ids and not 0 <= min(choice.token_ids) <= max(choice.token_ids) < TOKEN_ID_LIMIT:
        invalid = next(token_id for token_id in choice.token_ids if not 0 <= token_id < TOKEN_ID_LIMIT)
        raise ProviderError(f"{server} returned token id {invalid}; expected 0 to {TOKEN_ID_LIMIT - 1}")
    if logprobs and not -MAX_ABS_LOGPROB <= min(logprobs) <= max(logprobs) <= MAX_ABS_LOGPROB:  # JSON has no NaN
        index, value = next((index, value) for index, value in enumerate(logprobs) if abs(value) > MAX_ABS_LOGPROB)
        raise ProviderError(f"{server} returned logprob {value:g} for token {index} of its sample: not finite")
    return np.array(choice.token_ids, np.int32), np.array(logprobs, np.float32)


def build_usage(response: GenerateResponse, request: GenerateRequest, num_sampled: int) -> Usage:
    """Return the token counts; only the number of cached tokens is taken from the server."""
    details = response.usage.prompt_tokens_details if response.usage else None
    return Usage(len(request.prompt_ids), num_sampled, (details.cached_tokens or 0) if details else 0)


class UploadReply(Struct, frozen=True):
    """The reply to the upload of an image. `cache_bytes` is how many bytes of images the server keeps."""

    cache_bytes: int | None = None


def parse_finish_reason(reason: str | None, server: str) -> FinishReason:
    """Return the finish reason. Raises ProviderError if it is unknown."""
    for known in get_args(FinishReason):
        if reason == known:
            return known
    raise ProviderError(f"{server} returned the finish reason {reason!r}, expected stop, length or abort")


def parse_prompt_logprobs(
    response: GenerateResponse, token_ids: Sequence[int], server: str, *, start: int = 0
) -> NDArray[np.float32]:
    """Return the logprob of every prompt token from `start` on given those before it; NaN for others and the first."""
    table, first = response.prompt_logprobs, min(max(1, start), len(token_ids))
    if table is None or len(table) != len(token_ids):
        raise EngineIncompatible(f"{server} sent a response without prompt logprobs; use a native or vLLM server")
    try:
        logprobs = [
            float((entry or {})[str(int(token_id))]["logprob"])
            for entry, token_id in zip(table[first:], token_ids[first:])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ProviderError(f"{server} returned prompt logprobs without the prompt's own tokens: {error!r}") from error
    return np.array([*[np.nan] * first, *logprobs], np.float32)


def parse_top_logprobs(response: GenerateResponse, server: str, *, start: int, top_k: int) -> StructuredArray:
    """Return the `top_k` likeliest tokens at each position [tokens, top_k], as TOP_DTYPE; none before `start`.

    Raises RequestInvalid if the server returns fewer of them, and ProviderError if it returns something else.
    """
    tables = response.prompt_logprobs or []
    top = np.full((len(tables), top_k), np.array((-1, -np.inf), TOP_DTYPE))
    try:
        for row, table in zip(top[max(1, start) :], tables[max(1, start) :]):
            pairs = sorted(((float(entry["logprob"]), int(id)) for id, entry in (table or {}).items()), reverse=True)
            if len(pairs) < top_k:
                problem = f"returned {len(pairs)} likeliest tokens of a prompt's position, not {top_k}"
                raise RequestInvalid(f"{server} {problem}; lower top_k")
            row["logprob"], row["token"] = zip(*pairs[:top_k])
    except (KeyError, TypeError, ValueError) as error:
        raise ProviderError(f"{server} returned unreadable likeliest tokens: {error!r}") from error
    return top
