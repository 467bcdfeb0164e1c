"""Batches are stored in the ledger and rebuilt identically from the stored traces, for any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest

from ramify.core.errors import DataCorrupt
from ramify.env import plugin
from ramify.orchestrate.batches import (
    BatchGroup,
    decode_batch,
    encode_batch,
    rebuild_forests,
    split_by_rank,
)
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.ledger import GroupRecord, Ledger
from ramify.trace import Annotation, encode_trace
from ramify.train.batch import Batch, PackSpec, pack_forests
from tests.support.traces import make_trace, refuse_top_logprobs

SEQ_LEN = 14


def groups():
    """Two groups of three rollouts that share a prompt, from two sources; one rollout of the second was filtered."""
    for number, source, temperature in ((4, "reverse", 1.0), (1, "wordle", 0.7)):
        traces = [make_trace(f"{number}-{i}", i / 2, (10, 11 + i), turns=1 + i, version=i) for i in range(3)]
        annotations = plugin.build_plugin("algorithm", {"id": "grpo"}).annotate(traces)
        if number == 1:
            annotations = [annotation for annotation in annotations if annotation.trace_id != "1-0"]
        rollout_ids = tuple(f"r{trace.id}" for trace in traces)
        yield BatchGroup(number, source, temperature, rollout_ids, tuple(annotations)), traces


STORED = {f"r{trace.id}": [trace] for _, traces in groups() for trace in traces}
BATCH = encode_batch(7, [(group, group.build_forest(traces, SEQ_LEN)) for group, traces in groups()], SEQ_LEN)


def rebuild(stored_batch, traces=STORED, *, flat=False) -> Batch:
    """Rebuild a stored batch in one share."""
    forests = rebuild_forests(stored_batch, traces.__getitem__, refuse_top_logprobs)
    packs = pack_forests(forests, 128, PackSpec().layout, flat=flat)
    return Batch(stored_batch.step, packs, stored_batch.counts)


def entries(batches):
    """Return all entries as sorted rows that do not depend on how they were packed."""
    rows = []
    for batch in batches:
        for pack in batch.packs:
            targets = pack.targets
            for i in range(len(targets)):
                call = pack.calls[targets.call[i]]
                version = pack.versions[targets.version[i]]
                path = (pack.traces[call["trace"]], int(call["node"]), int(pack.position_ids[targets.token_index[i]]))
                numbers = (float(targets.logprob[i]), float(targets.advantage[i]), float(call["temperature"]))
                rows.append((*path, int(targets.token[i]), pack.envs[call["env"]], version.step, *numbers))
    return sorted(rows)


def test_batch_keeps_group_order_and_counts_entries():
    assert (BATCH.step, BATCH.group_numbers) == (7, (4, 1))
    assert BATCH.counts == {"rl": 2 * (1 + 2 + 3) + 2 * (2 + 3), "ce": 0, "ref_kl": 0, "kl": 0}


def test_overlong_paths_have_no_entries_after_rebuild():
    short = encode_batch(7, [(group, group.build_forest(traces, 12)) for group, traces in groups()], 12)
    assert short.counts["rl"] == 2 * (1 + 2) + 2 * 2  # the third rollouts have 14 tokens
    assert rebuild(short).entry_counts == short.counts


def test_batch_is_rebuilt_as_it_was_formed():
    batch = rebuild(BATCH)
    assert (batch.step, batch.entry_counts) == (7, BATCH.counts)
    assert sum(len(pack.targets) for pack in batch.packs) == BATCH.counts["rl"]
    assert {row[4] for row in entries([batch])} == {"reverse", "wordle"}
    assert "1-0" not in {row[0] for row in entries([batch])}
    assert sum(pack.flat_tokens for pack in batch.packs) > sum(pack.num_tokens for pack in batch.packs)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_entries_are_the_same_for_any_number_of_ranks(num_ranks):
    shares = split_by_rank(
        BATCH, rebuild_forests(BATCH, STORED.__getitem__, refuse_top_logprobs), PackSpec(pack_tokens=16), num_ranks
    )
    assert len(shares) == num_ranks
    assert len({len(share.packs) for share in shares}) == 1
    assert all(share.entry_counts == BATCH.counts for share in shares)
    assert entries(shares) == entries([rebuild(BATCH)])


def test_flat_packs_have_the_same_entries():
    flat = rebuild(BATCH, flat=True)
    assert entries([flat]) == entries([rebuild(BATCH)])


def test_annotations_round_trip_through_encoding():
    annotations = (
        Annotation("a", 1, (1, 3), np.array([0.5, -1.5], np.float32), 1.0, 0.25, 0.5, np.array([-1, -2], np.float32)),
        Annotation("b", 2, None, 2.0, np.array([0, 1, 1], np.float32), np.array([1, 0, 0], np.float32)),
        Annotation("a", 3),
    )
    group = BatchGroup(3, "source", 0.5, ("r1", "r2"), annotations)
    forest = BatchGroup(3, "source", 1.0, (), ()).build_forest([make_trace("x")], None)
    (decoded,), seq_len = decode_batch(encode_batch(0, [(group, forest)], None))
    assert seq_len is None
    assert (decoded.number, decoded.source_name, decoded.temperature) == (3, "source", 0.5)
    assert decoded.rollout_ids == ("r1", "r2")
    for annotation, original in zip(decoded.annotations, annotations, strict=True):
        for name in ("trace_id", "node", "span", "advantage", "rl", "ce", "ref_kl", "ref_logprobs", "kl"):
            np.testing.assert_array_equal(getattr(annotation, name), getattr(original, name))


def test_changed_traces_raise_batch_corrupt():
    other = STORED | {"r4-2": [make_trace("4-2", 1.0, (10, 11, 12), turns=3)]}
    with pytest.raises(DataCorrupt, match="batch 7 was formed with"):
        rebuild(BATCH, other)
    with pytest.raises(DataCorrupt, match=r"annotations of traces \['4-2'\]"):
        rebuild(BATCH, STORED | {"r4-2": []})


def test_malformed_annotations_raise_batch_corrupt():
    for data in (b"", BATCH.annotations[:-3], b"\x00" * 20):
        with pytest.raises(DataCorrupt, match="batch 7 cannot be read"):
            decode_batch(replace(BATCH, annotations=data))
    with pytest.raises(DataCorrupt, match=r"has groups \[4\], its annotations are of \[4, 1\]"):
        decode_batch(replace(BATCH, group_numbers=(4,)))


async def test_batch_round_trips_through_ledger_and_store(tmp_path):
    with RunStore.open(tmp_path) as store:
        ledger = Ledger.open(store)
        for group, traces in groups():
            number = len(ledger.groups())
            await ledger.issue_groups([GroupRecord(number, group.source_name, 0, 3)])
            for attempt, (rollout_id, trace) in enumerate(zip(group.rollout_ids, traces)):
                await ledger.record_sampled(number, attempt, RolloutRecord(rollout_id, "task"), [trace])
            await ledger.record_scored(number)
        scored_groups = [
            (replace(group, number=i), group.build_forest(traces, SEQ_LEN))
            for i, (group, traces) in enumerate(groups())
        ]
        await ledger.record_batch(encode_batch(0, scored_groups, SEQ_LEN))
    with RunStore.open(tmp_path) as store:
        (stored,) = Ledger.open(store).batches()
        traces = {rollout_id: store.read_traces(rollout_id) for rollout_id in STORED}
        assert entries([rebuild(stored, traces)]) == entries([rebuild(BATCH)])
        assert encode_trace(store.read_traces("r4-1")[0]) == encode_trace(STORED["r4-1"][0])
