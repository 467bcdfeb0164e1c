"""A saved state is loaded with equal values and types, or refused with a reason."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import OperationInvalid
from ramify.rollout.rewards import load_state, save_state
from ramify.trace import Trace
from ramify.trace.codec import decode_trace, encode_trace

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


def save_and_load(state: SimpleNamespace) -> SimpleNamespace:
    """Return the state after it was stored in a trace and loaded."""
    trace = Trace(id="t")
    trace.info["state"] = save_state(state)
    return load_state(decode_trace(encode_trace(trace)).info["state"])


def types(value: object) -> object:
    if isinstance(value, dict):
        return dict, [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(types(item)) for item in value)
    return type(value)


@given(st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=3))
def test_state_of_plain_values_is_loaded_with_the_same_types(values):
    loaded = vars(save_and_load(SimpleNamespace(**values)))
    assert loaded == values and types(loaded) == types(values)


def test_nan_is_saved():
    assert math.isnan(save_and_load(SimpleNamespace(value=math.nan)).value)


class DictSubclass(dict):
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), r"state.value is a object"),
        ([{"a": object()}], r"state.value\[0\]\['a'\] is a object"),
        (DictSubclass(), r"state.value is a DictSubclass"),
        ("x" * 2_000_000, r"state is larger than 1,000,000 characters"),
    ],
)
def test_value_that_cannot_be_saved_is_refused_with_its_location(value, reason):
    with pytest.raises(OperationInvalid, match=reason):
        save_state(SimpleNamespace(value=value))


def test_recursive_state_is_refused():
    value = []
    value.append(value)
    with pytest.raises(OperationInvalid, match="nested more than"):
        save_state(SimpleNamespace(value=value))
