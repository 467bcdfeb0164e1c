"""Splitting a forest: every target is kept once, with its full context."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.trace import Annotation, build_forest, split_forest
from tests.support.forests import (
    Attempt,
    Paths,
    Planned,
    calls_of,
    check_layout,
    entries_of,
    expected,
    groups,
    leaves,
    paths_of,
)

budgets = st.integers(1, 40)


@pytest.mark.promise
@given(groups(), budgets)
def test_every_target_is_in_one_piece_with_its_full_context(attempts, budget):
    paths = Paths()
    pieces = split_forest(build_forest([attempt.sample() for attempt in attempts]), budget)
    entries, _, _ = expected(attempts, paths)
    split_entries: Counter = Counter()
    for piece in pieces:
        check_layout(piece)
        split_entries += entries_of(piece, paths)
    assert split_entries == entries


@given(groups(), budgets)
def test_all_targets_of_a_call_are_in_one_piece(attempts, budget):
    pieces = split_forest(build_forest([attempt.sample() for attempt in attempts]), budget)
    homes = Counter(call for piece in pieces for call in calls_of(piece))
    assert all(count == 1 for count in homes.values())


@given(groups(), budgets)
def test_pieces_have_at_most_max_tokens_unless_they_are_one_path(attempts, budget):
    forest = build_forest([attempt.sample() for attempt in attempts])
    pieces = split_forest(forest, budget)
    for piece in pieces:
        assert len(piece) == piece.num_tokens
        assert len(piece) <= budget or leaves(piece) == 1
    assert sum(leaves(piece) for piece in pieces) == leaves(forest)


@given(groups(), budgets)
def test_piece_holds_only_tokens_its_targets_need(attempts, budget):
    paths = Paths()
    for piece in split_forest(build_forest([attempt.sample() for attempt in attempts]), budget):
        needed = {numbers for entry in entries_of(piece, paths) for numbers in paths.up(entry.path)}
        laid_out = paths_of(piece, paths)
        assert len(set(laid_out)) == len(laid_out)
        assert set(laid_out) == needed


@given(groups())
def test_forest_that_fits_is_not_split(attempts):
    forest = build_forest([attempt.sample() for attempt in attempts])
    assert split_forest(forest, len(forest)) == ([forest] if len(forest) else [])


@given(groups(), budgets, st.integers(1, 12))
def test_dropped_targets_are_reported_by_the_first_piece_only(attempts, budget, seq_len):
    forest = build_forest([attempt.sample() for attempt in attempts], seq_len=seq_len)
    pieces = split_forest(forest, budget)
    if pieces:
        assert [call for piece in pieces for call in piece.dropped.overlong_calls] == list(
            forest.dropped.overlong_calls
        )
    shortened = build_forest([attempt.sample() for attempt in attempts], seq_len=seq_len, overlong="cut")
    if pieces := split_forest(shortened, budget):
        assert sum(piece.dropped.num_truncated_tokens for piece in pieces) == shortened.dropped.num_truncated_tokens


def test_unshared_path_of_a_subtree_counts_against_max_tokens():
    """The second reply shares one token with the first and has three more above it."""
    replies = {token: Planned(parent, (token,) * 2, (0, 2), (-1.0,) * 2) for token, parent in ((5, 0), (6, 2), (7, 2))}
    nodes = (Planned(-1, (1,)), replies[5], Planned(0, (2, 2, 2)), replies[6], replies[7])
    attempt = Attempt("a", nodes, tuple(Annotation("a", node) for node in (1, 3, 4)))
    assert [len(piece) for piece in split_forest(build_forest([attempt.sample()]), 7)] == [3, 6, 6]


@pytest.mark.parametrize("budget", [0, -1])
def test_max_tokens_of_zero_gives_every_path_its_own_piece(budget):
    nodes = (Planned(-1, (1,)), *(Planned(0, (token,), (0, 1), (-1.0,)) for token in (5, 6)))
    attempt = Attempt("a", nodes, (Annotation("a", 1), Annotation("a", 2)))
    assert [piece.token_ids.tolist() for piece in split_forest(build_forest([attempt.sample()]), budget)] == [
        [1, 5],
        [1, 6],
    ]
