"""Packing trees: every tree once, nothing else, and padding that no token sees."""

import os
from collections import Counter
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.trace import Annotation, build_forest, concat_forests, make_padding_forest, pack_trees, split_forest
from tests.support.forests import (
    Attempt,
    Paths,
    Planned,
    Size,
    calls_of,
    check_layout,
    entries_of,
    expected,
    group,
    leaves,
    parents,
)


@st.composite
def batches(draw):
    """Attempts of some groups, their trees cut to a budget that some still exceed, and that budget."""
    rng = draw(st.randoms(use_true_random=False))
    attempts = [group(rng, Size(traces=2, nodes=5), f"g{number}-") for number in range(rng.randint(0, 4))]
    budget = rng.randint(1, 40)
    trees = [
        piece
        for each in attempts
        for piece in split_forest(build_forest([attempt.sample() for attempt in each]), budget)
    ]
    return [attempt for each in attempts for attempt in each], trees, budget


@given(batches(), st.integers(1, 8))
def test_each_tree_is_in_one_pack_and_sees_only_itself(batch, bucket):
    _, trees, budget = batch
    rows = pack_trees(trees, budget, bucket)

    def shapes(forests):
        """What each root and its subtree look like."""
        counts: Counter = Counter()
        for forest in forests:
            roots = [i for i, parent in enumerate(parents(forest)) if parent < 0 and i < forest.num_tokens]
            for start, stop in zip(roots, [*roots[1:], forest.num_tokens], strict=True):
                assert not forest.build_attention_mask()[start:stop, :start].any()
                media = tuple(
                    (item.start - start, item.stop - start, item.media.hash)
                    for item in forest.media
                    if start <= item.start < stop
                )
                counts[tuple(forest.token_ids[start:stop]), tuple(forest.subtree_end[start:stop] - start), media] += 1
        return counts

    assert shapes(rows) == shapes(trees)
    assert sum(row.num_tokens for row in rows) == sum(tree.num_tokens for tree in trees)
    for name in ("flat_tokens", "unique_tokens"):
        assert sum(getattr(row, name) for row in rows) == sum(getattr(tree, name) for tree in trees)


@given(batches(), st.integers(1, 8))
def test_packs_have_at_most_max_tokens_and_minimal_padding(batch, bucket):
    _, trees, budget = batch
    rows = pack_trees(trees, budget, bucket)
    oversize = Counter(len(tree) for tree in trees if len(tree) > budget)
    assert Counter(row.num_tokens for row in rows if row.num_tokens > budget) == oversize
    for row in rows:
        assert row.num_tokens > 0
        assert len(row) % bucket == 0 or len(row) == budget
        assert len(row) - row.num_tokens < bucket
        assert len(row) <= budget or row.num_tokens > budget
        padding = np.arange(len(row)) >= row.num_tokens
        seen = row.build_attention_mask()
        assert np.array_equal(seen[padding], np.eye(len(row), dtype=bool)[padding])
        assert np.array_equal(seen[:, padding], np.eye(len(row), dtype=bool)[:, padding])
        assert not padding[row.targets.token_index].any()
        assert not padding[row.targets.logits_index].any()


@given(batches())
def test_tables_of_a_pack_are_those_of_its_trees(batch):
    _, trees, _ = batch
    row = concat_forests(trees)
    for name in ("traces", "envs", "versions"):
        names = getattr(row, name)
        assert len(set(names)) == len(names)
        assert set(names) == {entry for tree in trees for entry in getattr(tree, name)}
    assert calls_of(row) == [call for tree in trees for call in calls_of(tree)]
    assert [item.media for item in row.media] == [item.media for tree in trees for item in tree.media]
    assert row.count_by_component() == {
        name: sum(tree.count_by_component()[name] for tree in trees) for name in ("rl", "ce", "ref_kl", "kl")
    }


def test_packs_have_little_unused_space():
    """Best fit by size leaves at most one row half empty."""
    rng = Random(0)
    trees = []
    for number in range(60):
        reply = tuple(rng.randrange(5) for _ in range(rng.randint(1, 60)))
        nodes = (Planned(-1, (1,)), Planned(0, reply, (0, len(reply)), (-1.0,) * len(reply)))
        trees.append(build_forest([Attempt(f"t{number}", nodes, (Annotation(f"t{number}", 1),)).sample()]))
    rows = pack_trees(trees, 100)
    assert sum(row.num_tokens * 2 <= 100 for row in rows) <= 1
    assert any(len(row.traces) > 2 for row in rows)


def test_padding_forest_has_no_targets_and_tokens_see_only_themselves():
    row = make_padding_forest(5)
    assert len(row) == row.num_attention_pairs == 5
    assert (row.num_tokens, row.flat_tokens, len(row.targets), len(row.calls)) == (0, 0, 0, 0)
    assert row.count_by_component() == {"rl": 0, "ce": 0, "ref_kl": 0, "kl": 0}
    assert np.array_equal(row.build_attention_mask(), np.eye(5, dtype=bool))


SMALL, LARGE = Size(), Size(traces=8, nodes=12, tokens=8)


@pytest.mark.promise
def test_traces_to_packs_with_every_mechanism():
    """Many seeds through the whole way; the counters say that every mechanism was met."""
    met: Counter = Counter()
    for seed in range(2000 if os.environ.get("RAMIFY_FULL") else 150):
        rng, paths = Random(seed), Paths()
        attempts = group(rng, rng.choice([SMALL, LARGE]))
        budget, seq_len = rng.randint(8, 80), rng.choice([None, rng.randint(4, 40)])
        overlong: Literal["drop", "cut"] = rng.choice(["drop", "cut"])
        forest = build_forest([attempt.sample() for attempt in attempts], seq_len=seq_len, overlong=overlong)
        pieces = split_forest(forest, budget)
        rows = pack_trees(pieces, 2 * budget, rng.choice([1, 8]))
        entries, too_long, past = expected(attempts, paths, seq_len, overlong)
        packed: Counter = Counter()
        for row in rows:
            check_layout(row)
            packed += entries_of(row, paths)
        assert packed == entries, seed
        assert all(len(piece) <= budget or leaves(piece) == 1 for piece in pieces), seed
        assert forest.dropped.num_truncated_tokens == past, seed
        assert Counter(forest.dropped.overlong_calls) == too_long, seed
        met["several roots"] += int(np.count_nonzero(forest.position_ids == 0)) > 1
        met["shared targets"] += len(np.unique(forest.targets.token_index)) < len(forest.targets)
        met["source elsewhere"] += bool((forest.targets.logits_index < forest.targets.token_index - 1).any())
        met["cut"] += len(pieces) > 1
        met["cut with images"] += len(pieces) > 1 and any(piece.media for piece in pieces)
        met["image shown twice"] += len({item.media.hash for item in forest.media}) < len(forest.media)
        met["over the budget"] += any(len(piece) > budget for piece in pieces)
        met["packed"] += len(rows) < len(pieces)
        met["padded"] += any(len(row) > row.num_tokens for row in rows)
        met["too long"] += len(forest) > 0 and len(too_long) > 0
        met["end cut"] += past > 0
    assert len(met) == 11
    assert min(met.values()) >= 2, met


def test_large_groups_of_thousands_of_nodes():
    paths, rng = Paths(), Random(0)
    attempts = group(rng, Size(traces=2, nodes=2000, fewest=1500, tokens=3, parting=0.2))
    entries: Counter = Counter()
    rows = pack_trees(split_forest(build_forest([attempt.sample() for attempt in attempts]), 500), 1000)
    for row in rows:
        entries += entries_of(row, paths)
    assert entries == expected(attempts, paths)[0]
    assert len(rows) > 1
