"""Batches are split across ranks and encoded without loss, and damaged bytes are refused."""

from collections import Counter
from dataclasses import fields
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import DataCorrupt
from ramify.model.pack_layout import PackLayout
from ramify.trace import Forest, Targets, build_forest, make_padding_forest
from ramify.train.batch import Batch, PackSpec, pack_forests, repack, split_across_ranks
from ramify.train.batch_codec import decode_batch, encode_batch
from tests.support.forests import Size, group

SIZE = Size(traces=4, nodes=8, fewest=5, tokens=16, vocab=50, logprobs=(-5.0, -0.1))


def build_batch(seed: int, groups: int = 4, pack_tokens: int = 128) -> Batch:
    rng = Random(seed)
    forests = [build_forest([attempt.sample() for attempt in group(rng, SIZE, f"g{i}-")]) for i in range(groups)]
    return Batch.from_packs(seed, pack_forests(forests, pack_tokens))


def get_columns(forest: Forest) -> dict[str, np.ndarray]:
    names = ("token_ids", "position_ids", "subtree_end", "calls", "segments")
    columns = {name: getattr(forest, name) for name in names}
    return columns | {column.name: getattr(forest.targets, column.name) for column in fields(Targets)}


def count_entries(packs) -> Counter:
    """Count the entries, each identified by its call, its token, its values and the tokens before it."""
    counts: Counter = Counter()
    for pack in packs:
        visible, targets = pack.build_attention_mask(), pack.targets
        for i in range(len(targets)):
            call = pack.calls[targets.call[i]]
            last = targets.logits_index[i] + 1
            prefix = tuple(pack.token_ids[:last][visible[last - 1, :last]].tolist())
            values = tuple(str(getattr(targets, name)[i]) for name in ("logprob", "advantage", "rl", "ce"))
            counts[pack.traces[call["trace"]], int(call["node"]), int(targets.token[i]), prefix, values] += 1
    return counts


@given(st.integers(0, 10_000))
def test_a_decoded_batch_equals_the_encoded_one_and_its_arrays_are_views(seed):
    batch = build_batch(seed)
    batch = Batch(batch.step, [*batch.packs, make_padding_forest(8)], batch.entry_counts)
    data = encode_batch(batch)
    decoded = decode_batch(data)
    assert (decoded.step, decoded.entry_counts) == (batch.step, batch.entry_counts)
    buffer = np.frombuffer(data, np.uint8)
    for actual, expected in zip(decoded.packs, batch.packs, strict=True):
        for name, column in get_columns(expected).items():
            assert get_columns(actual)[name].dtype == column.dtype
            np.testing.assert_array_equal(get_columns(actual)[name], column)
            if column.size:
                assert np.shares_memory(get_columns(actual)[name], buffer)
        for name in ("traces", "envs", "versions", "media", "flat_tokens", "unique_tokens", "dropped"):
            assert getattr(actual, name) == getattr(expected, name)
        assert count_entries([actual]) == count_entries([expected])


@given(st.integers(0, 100), st.randoms(use_true_random=False))
def test_damaged_bytes_are_refused(seed, rng):
    data = bytearray(encode_batch(build_batch(seed, groups=1)))
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    try:
        decoded = decode_batch(data)
    except DataCorrupt:
        return
    assert count_entries(decoded.packs) == count_entries(build_batch(seed, groups=1).packs)  # the damage hit padding


@given(st.integers(0, 1000), st.integers(1, 5))
def test_shares_have_equally_many_packs_and_hold_every_entry_once(seed, world_size):
    batch = build_batch(seed)
    shares = split_across_ranks(batch, PackSpec(flops_per_token=1.0, flops_per_pair=0.1), world_size)
    assert len(shares) == world_size
    assert len({len(share.packs) for share in shares}) == 1
    assert all(share.entry_counts == batch.entry_counts and share.step == batch.step for share in shares)
    assert count_entries(pack for share in shares for pack in share.packs) == count_entries(batch.packs)


def test_every_rank_gets_a_filler_pack_of_an_empty_batch():
    shares = split_across_ranks(Batch.from_packs(3, []), PackSpec(), 2)
    assert [sum(map(len, share.packs)) > 0 for share in shares] == [True, True]
    assert [share.entry_counts["rl"] for share in shares] == [0, 0]


@pytest.mark.parametrize("flat", [False, True])
def test_repacked_shares_hold_the_entries_of_the_batch(flat):
    batch = build_batch(7)
    pack_spec = PackSpec(layout=PackLayout.FOREST, pack_tokens=128, flops_per_token=1.0)
    repacked = repack(split_across_ranks(batch, pack_spec, 3), pack_spec, flat=flat)
    assert repacked.entry_counts == batch.entry_counts
    assert count_entries(repacked.packs) == count_entries(batch.packs)
    repacked_tokens, tokens = (sum(pack.num_tokens for pack in packs) for packs in (repacked.packs, batch.packs))
    assert repacked_tokens > tokens if flat else repacked_tokens == tokens


@given(st.integers(0, 10_000), st.sampled_from(PackLayout), st.sampled_from([0, 40, 256]))
def test_packs_keep_the_number_of_unique_tokens_however_they_repeat_them(seed, layout, pack_tokens):
    groups = [group(Random(seed + i), SIZE, f"g{i}-") for i in (0, 1)]
    forests = [build_forest([attempt.sample() for attempt in group]) for group in groups]
    packs = pack_forests(forests, pack_tokens, layout)
    unique = sum(forest.unique_tokens for forest in forests)
    assert sum(pack.unique_tokens for pack in packs) == unique <= sum(pack.num_tokens for pack in packs)
    batch = repack(split_across_ranks(Batch.from_packs(0, packs), PackSpec(), 2), PackSpec(layout, 60), flat=True)
    assert sum(pack.unique_tokens for pack in batch.packs) == unique
