"""Plain data: invalid values raise when they are set, with key and type; valid ones round-trip."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import OperationInvalid
from ramify.trace import Trace, decode_trace, encode_trace

DICTS = ("task", "info", "harness", "runtime", "sampler")


class Unknown:
    """A type of some environment package."""


class Color(str, enum.Enum):  # noqa: UP042 - the mixin is what people have
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    def __str__(self) -> str:
        return "something else"


def as_any(value: Any) -> Any:
    """The value of the wrong type that a test wants to give."""
    return value


def trace_with(name: str, value: Any) -> Trace:
    fields: dict[str, Any] = {"id": "t", name: value}
    return Trace(**fields)


UNPLAIN = {
    "Unknown": Unknown(),
    "set": {1},
    "bytes": b"x",
    "complex": 1j,
    "Decimal": Decimal(1),
    "datetime": datetime(2026, 1, 1),
    "PosixPath": Path("/x"),
    "ndarray": np.zeros(2),
    "generator": (x for x in "ab"),
    "type": int,
    "builtin_function_or_method": len,
    "str": "fine until \udfff",
    "int": 2**64,
}
SETTERS: dict[str, Callable[[Trace, str, Any], object]] = {
    "item": lambda trace, name, value: getattr(trace, name).__setitem__("bad", value),
    "update": lambda trace, name, value: getattr(trace, name).update({"good": 1, "bad": value}),
    "update with pairs": lambda trace, name, value: getattr(trace, name).update([("bad", value)]),
    "update by name": lambda trace, name, value: getattr(trace, name).update(bad=value),
    "setdefault": lambda trace, name, value: getattr(trace, name).setdefault("bad", value),
    "or": lambda trace, name, value: getattr(trace, name).__ior__({"bad": value}),
    "attribute": lambda trace, name, value: setattr(trace, name, {"bad": value}),
    "constructor": lambda trace, name, value: trace_with(name, {"bad": value}),
}

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), plain_values, max_size=4))
def test_plain_values_round_trip_with_their_types(values: dict):
    trace = Trace(id="t", info=values)
    assert trace.info == values
    again = decode_trace(encode_trace(trace)).info
    assert again == values
    assert repr(again) == repr(values)


@pytest.mark.parametrize("name", DICTS)
@pytest.mark.parametrize("how", SETTERS)
def test_invalid_value_raises_when_it_is_set(name: str, how: str):
    trace = Trace(id="t")
    with pytest.raises(OperationInvalid, match=rf"{name}\.bad.*Unknown"):
        SETTERS[how](trace, name, Unknown())
    assert "bad" not in getattr(trace, name)
    decode_trace(encode_trace(trace))


@pytest.mark.parametrize("kind", UNPLAIN)
def test_error_names_key_and_type(kind: str):
    trace = Trace(id="t")
    with pytest.raises(OperationInvalid, match=rf"info\.bad.*\b{kind}\b"):
        trace.info["bad"] = UNPLAIN[kind]
    assert trace.info == {}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": Unknown()}}, r"info\.x\.a\.b"),
        ([1, [2, Unknown()]], r"info\.x\[1\]\[1\]"),
        ({"a": [{"b": Unknown()}]}, r"info\.x\.a\[0\]\.b"),
        (({"a": (Unknown(),)},), r"info\.x\[0\]\.a\[0\]"),
    ],
)
def test_error_names_the_nested_key(value: object, where: str):
    with pytest.raises(OperationInvalid, match=rf"{where}.*Unknown"):
        Trace(id="t").info["x"] = value


def test_nested_dicts_check_later_values():
    trace = Trace(id="t", info={"a": {"b": {}}, "rows": [{"c": 1}]})
    with pytest.raises(OperationInvalid, match=r"info\.a\.b\.c.*Unknown"):
        trace.info["a"]["b"]["c"] = Unknown()
    with pytest.raises(OperationInvalid, match=r"info\.rows\[0\]\.c.*Unknown"):
        trace.info["rows"][0]["c"] = Unknown()
    with pytest.raises(OperationInvalid, match=r"info\.a\.b\.c.*Unknown"):
        trace.info["a"]["b"] |= {"c": Unknown()}
    assert trace.info == {"a": {"b": {}}, "rows": [{"c": 1}]}


def test_dict_is_copied_when_it_is_set():
    original = {"a": {"b": 1}, "l": [1]}
    trace = Trace(id="t", info=original)
    before = encode_trace(trace)
    original["a"]["b"] = Unknown()
    original["l"].append(Unknown())
    original["c"] = Unknown()
    assert encode_trace(trace) == before


@pytest.mark.parametrize("key", [1, None, (1, 2), b"x", "\ud800"])
def test_keys_must_be_str(key: object):
    trace = Trace(id="t")
    with pytest.raises(OperationInvalid, match="info"):
        trace.info[as_any(key)] = 1
    with pytest.raises(OperationInvalid, match=r"info\.x"):
        trace.info["x"] = {key: 1}
    assert trace.info == {}


def test_self_containing_values_raise():
    table: dict = {}
    table["again"] = table
    row: list = []
    row.append(row)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for endless in (table, row, deep):
        with pytest.raises(OperationInvalid, match=r"info\.x"):
            Trace(id="t").info["x"] = endless


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.float16(2), 2.0),
        (np.longdouble(1.5), 1.5),
        (Color.RED, "red"),
        (Level.HIGH, 3),
        (Name("kept"), "kept"),
        (True, True),
        ((1, (2,)), [1, [2]]),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": np.int64(1)}), {"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_and_enum_scalars_become_plain(value: object, expected: object):
    trace = Trace(id="t", info={"x": value})
    for stored in (trace.info["x"], decode_trace(encode_trace(trace)).info["x"]):
        assert stored == expected
        assert type(stored) is type(expected) or isinstance(stored, dict)


@pytest.mark.parametrize("name", [*DICTS, "rewards", "metrics"])
@pytest.mark.parametrize("value", [5, 0, "ab", "", Unknown(), [1], [], False], ids=lambda value: type(value).__name__)
def test_dict_field_accepts_only_a_mapping(name: str, value: object):
    trace = Trace(id="t")
    getattr(trace, name).update({"kept": 1} if name not in ("rewards",) else {"kept": (1, 1)})
    before = encode_trace(trace)
    with pytest.raises(OperationInvalid, match=rf"{name}.*{type(value).__name__}"):
        setattr(trace, name, value)
    with pytest.raises(OperationInvalid, match=rf"{name}.*{type(value).__name__}"):
        trace_with(name, value)
    assert encode_trace(trace) == before


# -- rewards and metrics -------------------------------------------------------------------------------------------

NO_NUMBERS = {
    "str": "1.0",
    "nan": float("nan"),
    "inf": float("-inf"),
    "NoneType": None,
    "Unknown": Unknown(),
    "list": [1.0],
    "complex": 1j,
    "int": 10**400,
    "ndarray": np.ones(1),
    "float32": np.float32("nan"),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
@pytest.mark.parametrize("how", SETTERS)
def test_metric_must_be_a_finite_number(how: str, kind: str):
    trace = Trace(id="t")
    with pytest.raises(OperationInvalid, match=rf"metrics\.bad.*{kind}"):
        SETTERS[how](trace, "metrics", NO_NUMBERS[kind])
    assert "bad" not in trace.metrics


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_score_and_weight_must_be_finite_numbers(kind: str):
    trace = Trace(id="t")
    for pair in ((NO_NUMBERS[kind], 1.0), (1.0, NO_NUMBERS[kind])):
        with pytest.raises(OperationInvalid, match=rf"rewards\.bad.*{kind}"):
            trace.rewards["bad"] = pair
    assert trace.rewards == {}


@pytest.mark.parametrize(
    "value",
    ["ab", 1.0, (1.0,), (1.0, 1.0, 1.0), {"score": 1}, {1, 2}, np.ones(2)],
    ids=lambda value: type(value).__name__,
)
def test_reward_must_be_score_and_weight_or_none(value: object):
    with pytest.raises(OperationInvalid, match=rf"rewards\.bad.*{type(value).__name__}"):
        Trace(id="t").rewards["bad"] = as_any(value)


def test_reward_is_the_weighted_sum():
    trace = Trace(id="t")
    assert trace.reward is None
    trace.rewards = {"a": (0.5, 2), "b": (True, 0.25)}
    trace.rewards["c"] = as_any([np.int64(-1), np.float32(1.0)])
    assert trace.reward == pytest.approx(0.25)
    assert decode_trace(encode_trace(trace)).rewards == {"a": (0.5, 2.0), "b": (1.0, 0.25), "c": (-1.0, 1.0)}
    trace.rewards["d"] = None
    assert trace.reward is None
    assert decode_trace(encode_trace(trace)).reward is None


# -- the rest of the header ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", 5),
        ("stop", None),
        ("stop", Unknown()),
        ("agent", "\ud800"),
        ("env", b"x"),
        ("group", ["g"]),
        ("attempt", "1"),
        ("attempt", 1.5),
        ("attempt", 2**70),
        ("timing", None),
        ("timing", {"model": 1.0}),
        ("errors", None),
        ("errors", [Unknown()]),
        ("errors", ["text"]),
    ],
)
def test_invalid_header_field_raises_by_name_when_it_is_set(name: str, value: object):
    trace = Trace(id="t")
    before = encode_trace(trace)
    with pytest.raises(OperationInvalid, match=name):
        setattr(trace, name, value)
    assert encode_trace(trace) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda trace: trace.errors.append("text"),
        lambda trace: setattr(trace.timing, "model", "long"),
        lambda trace: trace.info["log"].append(Unknown()),
        lambda trace: trace.info["log"].append(b"bytes"),
        lambda trace: trace.info["log"].append({1: 2}),
    ],
    ids=["errors", "timing", "object in a list", "bytes in a list", "table in a list"],
)
def test_value_changed_in_place_raises_by_name_when_encoded(spoil: Callable[[Trace], object]):
    """Encoding never writes bytes that cannot be decoded, which would lose the whole rollout."""
    trace = Trace(id="t", info={"log": []})
    try:
        spoil(trace)
        data = encode_trace(trace)
    except OperationInvalid:
        return
    assert encode_trace(decode_trace(data)) == data
    pytest.fail("a value of the wrong type was accepted")
