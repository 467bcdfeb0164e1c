"""The header of a trace: the fields that describe the rollout as a whole, and their checks."""

import math
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ramify.core.errors import Failure, OperationInvalid
from ramify.trace.plain_data import CheckedDict, check_number, check_reward, to_plain

TRACE_SCHEMA = 1
TURN_REWARDS_KEY = "turn_rewards"  # the key in the `info` of a trace: by reward, a number or None for each turn

WeightedScore = tuple[float, float] | None


class Timing(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Seconds spent in each phase of a rollout; `stalled` is the time an engine made no progress."""

    boot: float = 0.0
    setup: float = 0.0
    model: float = 0.0
    harness: float = 0.0
    finalize: float = 0.0
    scoring: float = 0.0
    stalled: float = 0.0


class TraceHeader(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of a trace that describe the rollout as a whole; plain data, readable without the environment.

    `Trace` describes the fields. Field names are part of the stored format.
    """

    id: str
    episode: str = ""
    group: str = ""
    attempt: int = 0
    agent: str = ""
    env: str = ""
    task: dict[str, Any] = {}
    rewards: dict[str, WeightedScore] = {}
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}
    errors: list[Failure] = []
    stop: str = ""
    timing: Timing = msgspec.field(default_factory=Timing)
    harness: dict[str, Any] = {}
    runtime: dict[str, Any] = {}
    sampler: dict[str, Any] = {}


_PLAIN_FIELDS = ("task", "info", "harness", "runtime", "sampler")
_FIELD_CHECKS = {"rewards": check_reward, "metrics": check_number} | dict.fromkeys(_PLAIN_FIELDS, to_plain)
_STR_FIELDS = ("id", "episode", "group", "agent", "env", "stop")
FIELD_TYPES: dict[str, Any] = {
    **dict.fromkeys(_STR_FIELDS, str),
    **dict.fromkeys(_FIELD_CHECKS, Mapping),
    "attempt": int,
    "timing": Timing,
    "errors": list,
}


def validate_field(name: str, value: Any) -> Any:
    """Return the value of a header field as plain data. Raises OperationInvalid, which names the field."""
    expected = FIELD_TYPES[name]
    if expected is str and _is_ascii_text(value):
        return value
    if not isinstance(value, expected):
        raise OperationInvalid(f"{name}: expected {expected.__name__}, found a {type(value).__qualname__}")
    if name in _FIELD_CHECKS:
        return CheckedDict(name, value, _FIELD_CHECKS[name])
    if isinstance(value, Timing):
        seconds = msgspec.structs.astuple(value)
        if all(type(phase) is float for phase in seconds) and math.isfinite(sum(seconds)):
            return Timing(*seconds)
        return Timing(*(check_number(getattr(value, phase), f"{name}.{phase}") for phase in Timing.__struct_fields__))
    if isinstance(value, list):
        for error in cast(list[object], value):
            if not isinstance(error, Failure):
                raise OperationInvalid(f"{name}: expected Failure, found a {type(error).__qualname__}")
        return list(cast(list[Failure], value))
    return expected(to_plain(value, name))


def _is_ascii_text(value: object) -> bool:
    """Return whether a value is a plain str that needs no further check, as nearly all ids and names are."""
    return type(value) is str and value.isascii()
