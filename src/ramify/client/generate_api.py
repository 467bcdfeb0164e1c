"""The generate endpoint on the wire: the body that is sent, and the part of the answer that is read.

Native and vLLM speak the same shape, but each reports the versions of the tokens in its own way. Decoding is typed, so
a server that answers something else is noticed here, by name, and not as an odd number in a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import ClientSampling
from ramify.errors import ProviderError, TokensRequired
from ramify.trace import Usage

S = TypeVar("S")
TOKEN_ID_LIMIT = 2**31  # token ids are stored in 32 bits
MAX_ABS_LOGPROB = float(np.finfo(np.float32).max)  # logprobs are stored and trained as float32


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sample to take."""

    prompt: Sequence[int]
    sampling: ClientSampling
    priority: int = 0
    salt: str | None = None

    def to_dict(self, **extra_fields: Any) -> dict[str, Any]:
        """The body of the request."""
        ids = self.prompt.tolist() if isinstance(self.prompt, np.ndarray) else list(self.prompt)
        fields: dict[str, Any] = {"token_ids": ids, "sampling_params": self.sampling.to_dict(), **extra_fields}
        if self.priority:
            fields["priority"] = self.priority
        if self.salt:
            fields["cache_salt"] = self.salt
        return fields


class TokenLogprob(msgspec.Struct, gc=False):
    """The logprob of one sampled token, with its rivals if they were asked for."""

    logprob: float
    top_logprobs: list[dict[str, Any]] = []


class ChoiceLogprobs(msgspec.Struct):
    """The logprobs of a choice."""

    content: list[TokenLogprob] | None = None


class WeightVersionSpan(msgspec.Struct):
    """Tokens [start, end) came from the weights with this label, as vLLM reports it."""

    version: str
    start: int
    end: int


class GenerateChoice(msgspec.Struct):
    """One sample, or a part of it."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    policy_versions: list[tuple[str, int, int, int]] | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class PromptTokensDetails(msgspec.Struct):
    """How much of the prompt was cached."""

    cached_tokens: int | None = None


class UsageInfo(msgspec.Struct):
    """Usage as the server reports it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class GenerateResponse(msgspec.Struct):
    """The answer, or one event of a streamed one."""

    choices: list[GenerateChoice]
    usage: UsageInfo | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def decode_json(data: bytes | str, body_type: type[S], server: str) -> S:
    """The body as `kind`, or a ProviderError that shows its beginning."""
    try:
        return msgspec.json.decode(data, type=body_type)
    except msgspec.DecodeError as error:
        shown = data[:200] if isinstance(data, str) else data[:200].decode("utf-8", "replace")
        raise ProviderError(f"{server} answered something unexpected ({error}): {shown}") from error


def get_only_choice(response: GenerateResponse, server: str) -> GenerateChoice:
    """Return the choice of an answer that must have exactly one. Raises ProviderError."""
    if len(response.choices) != 1:
        raise ProviderError(f"{server} answered {len(response.choices)} choices, one was asked for")
    return response.choices[0]


def get_sampled_tokens(choice: GenerateChoice, server: str) -> tuple[list[int], list[float]]:
    """Token ids and logprobs, one for each; a server that gives no such thing cannot be trained on."""
    if choice.token_ids is None or choice.logprobs is None or choice.logprobs.content is None:
        raise TokensRequired(f"{server} answered without token ids and logprobs")
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != len(choice.token_ids):
        raise ProviderError(f"{server} answered {len(choice.token_ids)} tokens with {len(logprobs)} logprobs")
    invalid = next((token for token in choice.token_ids if not 0 <= token < TOKEN_ID_LIMIT), None)
    if invalid is not None:
        raise ProviderError(f"{server} answered token id {invalid}; expected 0 to {TOKEN_ID_LIMIT - 1}")
    for at, logprob in enumerate(logprobs):
        if not abs(logprob) <= MAX_ABS_LOGPROB:
            raise ProviderError(f"{server} answered logprob {logprob:g} for token {at} of its sample: not finite")
    return choice.token_ids, logprobs


def build_usage(response: GenerateResponse, request: GenerateRequest, num_sampled: int) -> Usage:
    """The token counts, with our own where the server reports none."""
    details = response.usage.prompt_tokens_details if response.usage else None
    return Usage(len(request.prompt), num_sampled, (details.cached_tokens or 0) if details else 0)


def parse_prompt_logprobs(response: GenerateResponse, token_ids: Sequence[int], server: str) -> NDArray[np.float32]:
    """The logprob of every prompt token given those before it; NaN for the first."""
    table = response.prompt_logprobs
    if table is None or len(table) != len(token_ids):
        raise TokensRequired(f"{server} answered without prompt logprobs")
    try:
        found = [float((entry or {})[str(int(token))]["logprob"]) for entry, token in zip(table[1:], token_ids[1:])]
    except (KeyError, TypeError, ValueError) as error:
        raise ProviderError(f"{server} answered prompt logprobs without the prompt's own tokens: {error!r}") from error
    return np.array([np.nan, *found], np.float32)
