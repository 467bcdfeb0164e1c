"""The sampling parameters and stop strings of a call: from the source's config, the client, and a derived seed."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ramify.core.errors import RequestInvalid
from ramify.core.seeds import derive_seed
from ramify.infer.client import ClientSampling
from ramify.infer.gateway.budget import NO_TOKEN_LIMIT
from ramify.infer.gateway.config import SamplingConfig
from ramify.model.render import Tokenizer
from ramify.trace import Message


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The number of tokens up to the end of a stop string, which may end inside a token, and the string."""

    num_tokens: int
    stop_string: str

    def truncate(self, message: Message, prefill: str = "") -> Message:
        """Return the message without the stop string and the text after it; a stop string in `prefill` stays."""
        start = len(prefill) if message.text.startswith(prefill) else 0
        if (stop := message.text.find(self.stop_string, start)) >= 0:
            return replace(message, content=message.text[:stop])
        if message.reasoning and self.stop_string in message.reasoning:
            return replace(message, reasoning=message.reasoning.partition(self.stop_string)[0])
        return message


def find_stop(tokenizer: Tokenizer, token_ids: npt.NDArray[np.int32], stop_strings: Sequence[str]) -> StopMatch | None:
    """Return the match of the stop string that ends first, or None."""
    text = tokenizer.decode(token_ids)
    matches = [(text.find(stop) + len(stop), stop) for stop in stop_strings if stop in text]
    if not matches:
        return None
    _, stop = min(matches)
    counts = range(1, len(token_ids) + 1)
    index = bisect_left(counts, True, key=lambda count: stop in tokenizer.decode(token_ids[:count]))
    return StopMatch(counts[min(index, len(counts) - 1)], stop)


INT64_LIMIT = 2**63  # the largest integer of servers and traces, plus 1
SAMPLING_FIELDS: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def resolve_sampling(
    config: SamplingConfig, overrides: Mapping[str, Any], *, is_training: bool, seed: int | None
) -> ClientSampling:
    """Return the sampling parameters of one call.

    In training, a client can only lower `max_tokens`. `seed` is the derived seed of the call; if it is None, the
    client's seed is used.
    """
    params: dict[str, Any] = {name: getattr(config, name) for name in SAMPLING_FIELDS}
    if overrides and not is_training:
        for name, kind in SAMPLING_FIELDS.items():
            value = _check_number(overrides, name, (int, float), 0, INT64_LIMIT, "a number of at least 0")
            if value is not None:
                params[name] = kind(value)
        if seed is None:
            seed = _check_number(overrides, "seed", int, -INT64_LIMIT, INT64_LIMIT, "an integer of 64 bits")
    requested = _check_number(overrides, "max_tokens", int, 1, math.inf, "an integer of at least 1")
    limits = [limit for limit in (config.max_tokens, requested, NO_TOKEN_LIMIT) if limit is not None]
    return ClientSampling(**params, seed=seed, max_tokens=min(limits))


def parse_stop_strings(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the client's stop strings."""
    stop = overrides.get("stop")
    if not stop:
        return ()
    strings: Sequence[Any] = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, (str, list, tuple)) or not all(isinstance(text, str) for text in strings):
        raise RequestInvalid(f"stop: expected strings, found {stop!r}")
    return tuple(text for text in strings if text)


def derive_call_seed(seed: int | None, position_digest: bytes, sample_index: int) -> int | None:
    """Derive the seed of a call from its position and sample index; it is the same in every run."""
    if seed is None:
        return None
    return derive_seed(b"%d %d " % (seed, sample_index) + position_digest)


def sampling_to_dict(sampling: ClientSampling, stop_strings: tuple[str, ...]) -> dict[str, Any]:
    """Return the sampling parameters as the trace stores them."""
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in (*SAMPLING_FIELDS, "max_tokens")}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if stop_strings:
        fields["stop"] = list(stop_strings)
    return fields


def _check_number(
    overrides: Mapping[str, Any], name: str, types: type | tuple[type, ...], low: float, high: float, expected: str
) -> Any:
    """Return an override, or None if it is not set. Raises RequestInvalid if it is not in [low, high)."""
    value = overrides.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, types) or not low <= value < high):
        raise RequestInvalid(f"{name}: expected {expected}, found {value!r:.80}")
    return value
