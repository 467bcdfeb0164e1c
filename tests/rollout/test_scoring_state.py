"""The state of a rollout, saved: what comes back is equal, type by type, or the reason is said why not."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import ValueRefused
from ramify.rollout.scoring_state import load_state, save_state
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


def carried(state: SimpleNamespace) -> SimpleNamespace:
    """The state as it comes back from a trace that was stored."""
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


@given(st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), VALUES, max_size=3))
def test_a_state_of_plain_values_comes_back_with_the_same_types(values):
    found = vars(carried(SimpleNamespace(**values)))
    assert found == values and types(found) == types(values)


def test_numbers_that_json_does_not_know_come_back():
    assert math.isnan(carried(SimpleNamespace(value=math.nan)).value)


class Odd(dict):
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), r"state.value is a object"),
        ([{"a": object()}], r"state.value\[0\]\['a'\] is a object"),
        (Odd(), r"state.value is a Odd"),
        ("x" * 2_000_000, r"state is larger than 1,000,000 characters"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, reason):
    with pytest.raises(ValueRefused, match=reason):
        save_state(SimpleNamespace(value=value))


def test_a_state_that_holds_itself_is_named():
    value = []
    value.append(value)
    with pytest.raises(ValueRefused, match="nested more than"):
        save_state(SimpleNamespace(value=value))
