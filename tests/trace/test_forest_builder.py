"""Building a forest: the merge, the attention mask, the targets, and invalid annotations."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import OperationInvalid
from ramify.trace import (
    Annotation,
    build_forest,
    concat_forests,
)
from tests.support.forests import (
    COMPONENTS,
    Attempt,
    Paths,
    Planned,
    calls_of,
    check_layout,
    entries_of,
    expected,
    flat_tokens,
    groups,
    parents,
    paths_of,
)

LEAF = Planned(0, (5, 6), (0, 2), (-0.5, -0.25))


def rl(name: str, node: int, advantage: float = 1.0) -> Annotation:
    return Annotation(name, node, advantage=advantage)


# -- the merge and the mask ----------------------------------------------------------------------------------------


@given(groups())
def test_attention_mask_covers_ancestors_and_position_is_depth(attempts):
    forest = build_forest([attempt.sample() for attempt in attempts])
    check_layout(forest)
    depth: list[int] = []
    for parent in parents(forest):
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    assert forest.position_ids.tolist() == depth


@given(groups(), st.none() | st.integers(2, 20), st.sampled_from(["drop", "cut"]))
def test_without_merge_the_forest_is_the_concatenation_of_its_traces(attempts, seq_len, overlong):
    traces = [attempt.sample() for attempt in attempts]
    forest = build_forest(traces, seq_len=seq_len, overlong=overlong, merge=False)
    expected_forest = concat_forests([build_forest([trace], seq_len=seq_len, overlong=overlong) for trace in traces])
    for owner, expected_owner in ((forest, expected_forest), (forest.targets, expected_forest.targets)):
        for name in (column.name for column in fields(owner) if column.name != "targets"):
            value, expected_value = getattr(owner, name), getattr(expected_owner, name)
            if isinstance(value, np.ndarray):
                assert (value.dtype, value.shape) == (expected_value.dtype, expected_value.shape), name
                assert value.tobytes() == expected_value.tobytes(), name
            else:
                assert value == expected_value, name


@pytest.mark.promise
@given(groups())
def test_layout_holds_each_trained_path_token_once(attempts):
    paths = Paths()
    forest = build_forest([attempt.sample() for attempt in attempts])
    entries, _, _ = expected(attempts, paths)
    needed = {numbers for entry in entries for numbers in paths.up(entry.path)}
    laid_out = paths_of(forest, paths)
    assert len(laid_out) == len(set(laid_out)) == forest.num_tokens == forest.unique_tokens
    assert set(laid_out) == needed


@given(groups())
def test_forest_lists_the_media_of_its_placeholders(attempts):
    paths = Paths()
    forest = build_forest([attempt.sample() for attempt in attempts])
    entries, _, _ = expected(attempts, paths)
    needed = {numbers for entry in entries for numbers in paths.up(entry.path)}
    placeholders = sum(paths.key[numbers][1] is not None for numbers in needed)
    assert sum(item.stop - item.start for item in forest.media) == placeholders
    assert [item.start for item in forest.media] == sorted({item.start for item in forest.media})


@given(groups(), st.integers(0, 99))
def test_merge_does_not_depend_on_annotations(attempts, seed):
    rng = np.random.default_rng(seed)
    reweighted = [
        replace(
            attempt,
            notes=tuple(
                replace(note, advantage=float(rng.normal()), rl=np.multiply(note.rl, 3.0), ce=np.multiply(note.ce, 0.5))
                for note in attempt.notes
            ),
        )
        for attempt in attempts
    ]
    one, two = (build_forest([attempt.sample() for attempt in either]) for either in (attempts, reweighted))
    for name in ("token_ids", "position_ids", "subtree_end", "segments"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert one.media == two.media
    for name in ("token", "token_index", "logits_index", "call", "version"):
        assert np.array_equal(getattr(one.targets, name), getattr(two.targets, name))


@given(groups(), st.randoms(use_true_random=False))
def test_targets_do_not_depend_on_trace_order(attempts, rng):
    paths = Paths()
    one = entries_of(build_forest([attempt.sample() for attempt in attempts]), paths)
    shuffled = rng.sample(attempts, len(attempts))
    assert entries_of(build_forest([attempt.sample() for attempt in shuffled]), paths) == one


def test_different_images_fork_at_equal_placeholders():
    def attempt(name: str, data: bytes, run: tuple[int, ...]) -> Attempt:
        stop = 1 + len(run)
        return Attempt(name, (Planned(-1, (1, *run, 2), images=((1, stop, data),)), LEAF), (rl(name, 1),))

    same = build_forest([attempt("a", b"cat", (9, 9)).sample(), attempt("b", b"cat", (9, 9)).sample()])
    assert len(same) == 6
    assert [(item.start, item.stop, item.media.data) for item in same.media] == [(1, 3, b"cat")]
    for other in (attempt("b", b"dog", (9, 9)), attempt("b", b"cat", (9, 9, 9)), attempt("b", b"cat", (9, 8))):
        forest = build_forest([attempt("a", b"cat", (9, 9)).sample(), other.sample()])
        check_layout(forest)
        assert len(forest.media) == 2
        assert len(forest) == 6 + len(other.nodes[0].tokens) + 1  # only the token before the image is shared


# -- the targets ---------------------------------------------------------------------------------------------------


@pytest.mark.promise
@given(groups())
def test_each_trained_token_is_one_target_with_its_values(attempts):
    paths = Paths()
    forest = build_forest([attempt.sample() for attempt in attempts])
    entries, _, _ = expected(attempts, paths)
    assert entries_of(forest, paths) == entries
    assert sorted(calls_of(forest)) == sorted({(entry.trace, entry.node) for entry in entries})


@given(groups())
def test_component_counts_and_head_inputs_match_the_entries(attempts):
    forest = build_forest([attempt.sample() for attempt in attempts])
    rows = [row for attempt in attempts for note in attempt.notes for _, row in attempt.values(note)]
    assert forest.count_by_component() == {name: sum(row[name] != 0 for row in rows) for name in COMPONENTS}
    sources, tokens, own = forest.unique_head_inputs()
    pairs = list(zip(sources.tolist(), tokens.tolist(), strict=True))
    wanted = list(zip(forest.targets.logits_index.tolist(), forest.targets.token.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert [pairs[which] for which in own.tolist()] == wanted


def test_forest_without_targets_is_empty():
    untrained = Attempt("a", (Planned(-1, (1, 2)), LEAF), ())
    weightless = replace(untrained, notes=(Annotation("a", 1, rl=0.0),))
    for samples in ([], [untrained.sample()], [weightless.sample()]):
        forest = build_forest(samples)
        assert (
            len(forest),
            forest.num_tokens,
            forest.flat_tokens,
            forest.num_attention_pairs,
            len(forest.targets),
        ) == (0, 0, 0, 0, 0)
        assert forest.count_by_component() == {"rl": 0, "ce": 0, "ref_kl": 0, "kl": 0}
        assert forest.build_attention_mask().shape == (0, 0)


# -- paths over the limit ------------------------------------------------------------------------------------------


@given(groups(), st.integers(1, 20), st.sampled_from(["drop", "cut"]))
def test_overlong_paths_are_dropped_or_truncated_and_counted(attempts, seq_len, overlong):
    paths = Paths()
    forest = build_forest([attempt.sample() for attempt in attempts], seq_len=seq_len, overlong=overlong)
    entries, too_long, cut = expected(attempts, paths, seq_len, overlong)
    check_layout(forest)
    assert entries_of(forest, paths) == entries
    assert Counter(forest.dropped.overlong_calls) == too_long
    assert forest.dropped.num_truncated_tokens == cut
    assert set(paths_of(forest, paths)) == {numbers for entry in entries for numbers in paths.up(entry.path)}


# -- refusals ------------------------------------------------------------------------------------------------------

PLAIN = (Planned(-1, (1, 2)), Planned(0, (8, 5, 6), (1, 3), (-0.5, -0.25)))
IMAGE = (Planned(-1, (1, 9, 9), images=((1, 3, b"cat"),)), LEAF)


@pytest.mark.parametrize(
    ("nodes", "notes", "words"),
    [
        (PLAIN, [rl("trace-a", 1), rl("trace-a", 1)], ["trace-a", "node 1", "two"]),
        (PLAIN, [rl("trace-b", 1)], ["trace-a", "trace-b"]),
        (PLAIN, [rl("trace-a", 2)], ["trace-a", "node 2"]),
        (PLAIN, [rl("trace-a", -1)], ["trace-a", "node -1"]),
        (PLAIN, [Annotation("trace-a", 1, (1, 4))], ["trace-a", "node 1", "(1, 4)"]),
        (PLAIN, [Annotation("trace-a", 1, (-1, 2))], ["trace-a", "node 1", "(-1, 2)"]),
        (PLAIN, [Annotation("trace-a", 1, (2, 1))], ["trace-a", "node 1", "(2, 1)"]),
        (PLAIN, [Annotation("trace-a", 0, (0, 2), rl=0.0, ce=1.0)], ["trace-a", "node 0", "token 0", "root"]),
        (PLAIN, [Annotation("trace-a", 1, (0, 3))], ["trace-a", "node 1", "token 0", "sampler logprob"]),
        (PLAIN, [Annotation("trace-a", 1, rl=0.0, ref_kl=1.0)], ["trace-a", "node 1", "token 1", "reference"]),
        (PLAIN, [Annotation("trace-a", 1, advantage=np.nan)], ["trace-a", "node 1", "token 1", "finite"]),
        (
            PLAIN,
            [Annotation("trace-a", 1, advantage=np.array([1, np.inf], np.float32))],
            ["trace-a", "node 1", "token 2", "finite"],
        ),
        (PLAIN, [Annotation("trace-a", 1, rl=np.nan)], ["trace-a", "node 1", "token 1", "finite"]),
        (PLAIN, [Annotation("trace-a", 1, ce=np.inf)], ["trace-a", "node 1", "token 1", "finite"]),
        (PLAIN, [Annotation("trace-a", 1, ref_kl=1.0, ref_logprobs=-np.inf)], ["trace-a", "node 1", "token 1"]),
        (PLAIN, [Annotation("trace-a", 1, advantage=np.ones(3, np.float32))], ["trace-a", "node 1", "advantage"]),
        (PLAIN, [Annotation("trace-a", 1, ce=np.ones(1, np.float32))], ["trace-a", "node 1", "ce"]),
        (PLAIN, [Annotation("trace-a", 1, rl=np.ones((1, 2), np.float32))], ["trace-a", "node 1", "rl"]),
        (PLAIN, [Annotation("trace-a", 1, ref_kl=1.0, ref_logprobs=[-1.0])], ["trace-a", "node 1", "ref_logprobs"]),
        (IMAGE, [Annotation("trace-a", 0, (1, 3), rl=0.0, ce=1.0)], ["trace-a", "node 0", "token 1", "placeholder"]),
        ((PLAIN[0], replace(PLAIN[1], trainable=False)), [rl("trace-a", 1)], ["trace-a", "node 1", "trainable"]),
        ((PLAIN[0], replace(PLAIN[1], logprobs=(-np.inf, -1.0))), [rl("trace-a", 1)], ["trace-a", "node 1", "token 1"]),
        ((PLAIN[0], replace(PLAIN[1], logprobs=(-1.0, np.nan))), [rl("trace-a", 1)], ["trace-a", "node 1", "token 2"]),
    ],
)
def test_untrainable_target_raises_and_names_the_token(nodes, notes, words):
    other = Attempt("other", PLAIN, (rl("other", 1),)).sample()
    sample = Attempt("trace-a", nodes, tuple(notes)).sample()
    for samples in ([sample], [other, sample]):
        with pytest.raises(OperationInvalid) as refusal:
            build_forest(samples)
        assert all(word in str(refusal.value) for word in words), refusal.value


@given(groups())
def test_flat_tokens_count_trained_paths_without_sharing(attempts):
    assert build_forest([attempt.sample() for attempt in attempts]).flat_tokens == flat_tokens(attempts)


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_temperature_must_be_finite_and_above_zero(temperature):
    with pytest.raises(OperationInvalid, match="temperature"):
        build_forest([Attempt("t", PLAIN, (rl("t", 1),), temperature).sample()])


def test_ref_kl_requires_temperature_one():
    note = Annotation("t", 1, ref_kl=1.0, ref_logprobs=np.array([-1.0, -1.0], np.float32))
    build_forest([Attempt("t", PLAIN, (note,)).sample()])
    with pytest.raises(OperationInvalid, match=r"node 1.*'t'.*ref_kl.*temperature"):
        build_forest([Attempt("t", PLAIN, (note,), 0.7).sample()])


def test_repeated_trace_raises():
    sample = Attempt("trace-a", PLAIN, (rl("trace-a", 1),)).sample()
    with pytest.raises(OperationInvalid, match="trace-a"):
        build_forest([sample, sample])


def test_untrainable_node_accepts_only_ce():
    nodes = (PLAIN[0], replace(PLAIN[1], trainable=False))
    forest = build_forest([Attempt("a", nodes, (Annotation("a", 1, rl=0.0, ce=1.0),)).sample()])
    assert forest.count_by_component() == {"rl": 0, "ce": 2, "ref_kl": 0, "kl": 0}
