"""Tokens are ordered, also as integers and in file names; a gate stays closed to older ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import ProcessReplaced
from ramify.run.fencing.token import MAX_INCARNATION, MAX_TERM, TOKEN_PATTERN, FencingToken, TokenGate, check_token

tokens = st.builds(FencingToken, st.integers(0, MAX_TERM), st.integers(0, MAX_INCARNATION))


@given(tokens, tokens)
def test_number_and_text_keep_token_and_order(first, second):
    assert (first < second) == (first.number < second.number)
    assert FencingToken.from_number(first.number) == FencingToken.parse(str(first)) == first
    assert first.number < 2**31 and re.fullmatch(TOKEN_PATTERN, str(first))


def test_term_0_reads_like_a_plain_incarnation():
    assert (str(FencingToken(0, 3)), FencingToken(0, 3).number, str(FencingToken(1, 3))) == ("3", 3, "1.3")


@pytest.mark.parametrize("text", ["", "a", "1.", ".1", "-1", "1.2.3", str(MAX_INCARNATION + 1)])
def test_other_text_is_not_a_token(text):
    with pytest.raises(ValueError, match="is not a token"):
        FencingToken.parse(text)


@pytest.mark.promise
def test_only_the_newest_token_may_act():
    check_token("trainer", FencingToken(1, 2), FencingToken(1, 2))
    with pytest.raises(ProcessReplaced, match=r"trainer 1\.1 may not act, because the newest is trainer 1\.2"):
        check_token("trainer", FencingToken(1, 1), FencingToken(1, 2))
    with pytest.raises(ProcessReplaced, match="must be recorded before it is used"):
        check_token("trainer", FencingToken(1, 3), FencingToken(1, 2))


@pytest.mark.promise
@given(st.lists(tokens))
def test_gate_passes_tokens_in_rising_order_only(sequence):
    gate, passed = TokenGate("trainer"), []
    for token in sequence:
        try:
            gate.check(token)
        except ProcessReplaced:
            assert token < max(passed, default=FencingToken())
        else:
            passed.append(token)
    assert passed == sorted(passed)
