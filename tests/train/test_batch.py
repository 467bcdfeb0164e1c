"""A batch arrives as it was cut, in shares that add up to it, and bytes that changed on the way are refused."""

import subprocess
import sys
from collections import Counter
from dataclasses import fields
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import BatchCorrupt
from ramify.model.pack_layout import PackLayout
from ramify.trace import Forest, Targets, build_forest, make_padding_forest
from ramify.train.batch import Batch, PackSpec, decode_batch, encode_batch, pack_forests, repack, split_across_ranks
from tests.trace.forests import Size, group

SIZE = Size(traces=4, nodes=8, fewest=5, tokens=16, vocab=50, logprobs=(-5.0, -0.1))


def batch(seed: int, groups: int = 4, budget: int = 128) -> Batch:
    rng = Random(seed)
    forests = [build_forest([each.sample() for each in group(rng, SIZE, f"g{number}-")]) for number in range(groups)]
    return Batch.from_packs(seed, pack_forests(forests, budget))


def columns(forest: Forest) -> dict[str, np.ndarray]:
    named = {name: getattr(forest, name) for name in ("ids", "position", "end", "sequences", "segments")}
    return named | {entry.name: getattr(forest.targets, entry.name) for entry in fields(Targets)}


def entries(packs) -> Counter:
    """Every entry by what it is: its call, its token, the tokens before it."""
    found: Counter = Counter()
    for pack in packs:
        visible = pack.visible()
        for at in range(len(pack.targets)):
            call = pack.sequences[pack.targets.sequence[at]]
            source = pack.targets.source[at]
            path = tuple(pack.ids[: source + 1][visible[source, : source + 1]].tolist())
            values = tuple(str(getattr(pack.targets, name)[at]) for name in ("logprob", "advantage", "rl", "ce"))
            found[pack.traces[call["trace"]], int(call["node"]), int(pack.targets.token[at]), path, values] += 1
    return found


@given(st.integers(0, 10_000))
def test_a_batch_comes_back_as_it_was_as_views_over_its_bytes(seed):
    sent = batch(seed)
    sent = Batch(sent.step, [*sent.packs, make_padding_forest(8)], sent.entry_counts)
    data = encode_batch(sent)
    got = decode_batch(data)
    assert (got.step, got.entry_counts) == (sent.step, sent.entry_counts)
    whole = np.frombuffer(data, np.uint8)
    for ours, theirs in zip(got.packs, sent.packs, strict=True):
        for name, column in columns(theirs).items():
            assert columns(ours)[name].dtype == column.dtype
            np.testing.assert_array_equal(columns(ours)[name], column)
            if len(column):
                assert np.shares_memory(columns(ours)[name], whole)
        for name in ("traces", "envs", "versions", "media", "flat_tokens", "dropped"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert entries([ours]) == entries([theirs])


@given(st.integers(0, 100), st.randoms(use_true_random=False))
def test_bytes_that_changed_are_refused(seed, rng):
    data = bytearray(encode_batch(batch(seed, groups=1)))
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    try:
        got = decode_batch(data)
    except BatchCorrupt:
        return
    assert entries(got.packs) == entries(batch(seed, groups=1).packs)  # the four bytes of nothing, or padding's end


@given(st.integers(0, 1000), st.integers(1, 5))
def test_shares_have_equally_many_packs_and_hold_every_entry_once(seed, ranks):
    whole = batch(seed)
    parts = split_across_ranks(whole, PackSpec(per_token=1.0, per_pair=0.1), ranks)
    assert len(parts) == ranks
    assert len({len(part.packs) for part in parts}) == 1
    assert all(part.entry_counts == whole.entry_counts and part.step == whole.step for part in parts)
    assert entries(pack for part in parts for pack in part.packs) == entries(whole.packs)


def test_an_empty_batch_keeps_every_rank_busy_with_nothing():
    parts = split_across_ranks(Batch.from_packs(3, []), PackSpec(), 2)
    assert [sum(map(len, part.packs)) > 0 for part in parts] == [True, True]
    assert [part.entry_counts["rl"] for part in parts] == [0, 0]


@pytest.mark.parametrize("flat", [False, True])
def test_shares_are_put_together_again_as_a_forest_or_flat(flat):
    whole = batch(7)
    laying = PackSpec(layout=PackLayout.FOREST, pack_tokens=128, per_token=1.0)
    again = repack(split_across_ranks(whole, laying, 3), laying, flat=flat)
    assert again.entry_counts == whole.entry_counts
    assert entries(again.packs) == entries(whole.packs)
    tokens = [sum(pack.num_tokens for pack in each.packs) for each in (again, whole)]
    assert tokens[0] > tokens[1] if flat else tokens[0] == tokens[1]


def test_cutting_sharing_and_encoding_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import ramify.train.remote_batch_source, ramify.train.sft.plan"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
