"""The sampling parameters of a call: from the source's config, the client's overrides, and a derived seed."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ramify.client import ClientSampling
from ramify.errors import RequestInvalid
from ramify.gateway.budget import NO_TOKEN_LIMIT
from ramify.gateway.config import SamplingConfig

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
    if not is_training:
        params |= {
            name: _parse_number(name, overrides[name]) for name in SAMPLING_FIELDS if overrides.get(name) is not None
        }
        seed = _parse_seed(overrides) if seed is None else seed
    limits = [n for n in (config.max_tokens, _parse_max_tokens(overrides)) if n is not None]
    return ClientSampling(**params, seed=seed, max_tokens=min([*limits, NO_TOKEN_LIMIT]))


def parse_stop_strings(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the client's stop strings."""
    stop = overrides.get("stop")
    if not stop:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) for text in strings):
        raise RequestInvalid(f"stop: expected strings, found {stop!r}")
    return tuple(text for text in strings if text)


def derive_call_seed(seed: int | None, position_digest: bytes, sample_index: int) -> int | None:
    """Derive the seed of a call from its position and sample index; it is the same in every run."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(b"%d %d " % (seed, sample_index) + position_digest, digest_size=4).digest()) >> 1


def sampling_to_dict(sampling: ClientSampling, stop_strings: tuple[str, ...]) -> dict[str, Any]:
    """Return the sampling parameters as the trace stores them."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if stop_strings:
        fields["stop"] = list(stop_strings)
    return fields


def _parse_max_tokens(overrides: Mapping[str, Any]) -> int | None:
    max_tokens = overrides.get("max_tokens")
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise RequestInvalid(f"max_tokens: expected an integer of at least 1, found {max_tokens!r}")
    return max_tokens


def _parse_seed(overrides: Mapping[str, Any]) -> int | None:
    seed = overrides.get("seed")
    if seed is not None and (
        not isinstance(seed, int) or isinstance(seed, bool) or not -INT64_LIMIT <= seed < INT64_LIMIT
    ):
        raise RequestInvalid(f"seed: expected an integer of 64 bits, found {seed!r:.80}")
    return seed


def _parse_number(name: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < INT64_LIMIT:
        raise RequestInvalid(f"{name}: expected a number of at least 0, found {value!r:.80}")
    return SAMPLING_FIELDS[name](value)
