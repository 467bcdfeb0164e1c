"""A batch is rebuilt from the ledger and the stored traces, the same each time, for any number of ranks."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from ramify.env import plugin
from ramify.errors import BatchCorrupt
from ramify.orchestrate.batches import (
    BatchGroup,
    decode_batch,
    encode_batch,
    rebuild_batch,
    rebuild_forests,
    split_by_rank,
)
from ramify.store import RolloutRecord, RunStore
from ramify.store.ledger import GroupRecord, Ledger
from ramify.trace import Annotation, encode_trace
from ramify.trace.forest import LOSS_COMPONENTS, Targets
from ramify.train.batch import PackSpec
from tests.orchestrate.rollouts import rollout

SEQ_LEN = 14


def groups():
    """Two groups of three rollouts that share a prompt, from two sources; one rollout of the second was filtered."""
    for number, env, temperature in ((4, "reverse", 1.0), (1, "wordle", 0.7)):
        traces = [rollout(f"{number}-{i}", i / 2, (10, 11 + i), turns=1 + i, version=i) for i in range(3)]
        notes = plugin.build_plugin("algorithm", {"id": "grpo"}).annotate(traces)
        if number == 1:
            notes = [note for note in notes if note.trace_id != "1-0"]
        yield BatchGroup(number, env, temperature, tuple(f"r{trace.id}" for trace in traces), tuple(notes)), traces


STORED = {f"r{trace.id}": [trace] for _, traces in groups() for trace in traces}
BATCH = encode_batch(7, [(member, member.build_forest(traces, SEQ_LEN)) for member, traces in groups()], SEQ_LEN)
LAYING = PackSpec(pack_tokens=128)


def entries(batches):
    """All targets as sorted rows that do not depend on where they were laid."""
    rows = []
    for batch in batches:
        for pack in batch.packs:
            targets = pack.targets
            for i in range(len(targets)):
                call = pack.sequences[targets.sequence[i]]
                version = pack.versions[targets.version[i]]
                path = (pack.traces[call["trace"]], int(call["node"]), int(pack.position[targets.index[i]]))
                numbers = (float(targets.logprob[i]), float(targets.advantage[i]), float(call["temperature"]))
                rows.append((*path, int(targets.token[i]), pack.envs[call["env"]], version.step, *numbers))
    return sorted(rows)


def test_a_batch_has_its_groups_in_order_and_counts_its_entries():
    assert (BATCH.step, BATCH.group_numbers) == (7, (4, 1))
    assert BATCH.counts == {"rl": 2 * (1 + 2 + 3) + 2 * (2 + 3), "ce": 0, "ref_kl": 0}


def test_a_path_beyond_seq_len_has_no_entry_and_stays_so_when_rebuilt():
    short = encode_batch(7, [(member, member.build_forest(traces, 12)) for member, traces in groups()], 12)
    assert short.counts["rl"] == 2 * (1 + 2) + 2 * 2  # the third rollouts have 14 tokens
    assert rebuild_batch(short, STORED.__getitem__, LAYING).entry_counts == short.counts


def test_it_is_rebuilt_as_it_was_decided():
    batch = rebuild_batch(BATCH, STORED.__getitem__, LAYING)
    assert (batch.step, batch.entry_counts) == (7, BATCH.counts)
    assert sum(len(pack.targets) for pack in batch.packs) == BATCH.counts["rl"]
    assert {row[4] for row in entries([batch])} == {"reverse", "wordle"}
    assert "1-0" not in {row[0] for row in entries([batch])}
    assert sum(pack.flat_tokens for pack in batch.packs) > sum(pack.num_tokens for pack in batch.packs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_number_of_ranks_is_given_the_same_entries(ranks):
    parts = split_by_rank(BATCH, rebuild_forests(BATCH, STORED.__getitem__), PackSpec(pack_tokens=16), ranks)
    assert len(parts) == ranks
    assert len({len(part.packs) for part in parts}) == 1
    assert all(part.entry_counts == BATCH.counts for part in parts)
    assert entries(parts) == entries([rebuild_batch(BATCH, STORED.__getitem__, LAYING)])


def test_flat_packs_hold_the_same_entries():
    flat = rebuild_batch(BATCH, STORED.__getitem__, LAYING, flat=True)
    assert entries([flat]) == entries([rebuild_batch(BATCH, STORED.__getitem__, LAYING)])


def test_everything_an_annotation_can_say_survives():
    notes = (
        Annotation("a", 1, (1, 3), np.array([0.5, -1.5], np.float32), 1.0, 0.25, 0.5, np.array([-1, -2], np.float32)),
        Annotation("b", 2, None, 2.0, np.array([0, 1, 1], np.float32), np.array([1, 0, 0], np.float32)),
        Annotation("a", 3),
    )
    member = BatchGroup(3, "env", 0.5, ("r1", "r2"), notes)
    empty = rollout("x")
    forest = BatchGroup(3, "env", 1.0, (), ()).build_forest([empty], None)
    found, seq_len = decode_batch(encode_batch(0, [(member, forest)], None))
    assert seq_len is None
    (same,) = found
    assert (same.group, same.env, same.temperature, same.rollouts) == (3, "env", 0.5, ("r1", "r2"))
    for note, other in zip(same.annotations, notes, strict=True):
        for name in ("trace", "node", "span", "advantage", "rl", "ce", "ref_kl", "reference"):
            np.testing.assert_array_equal(getattr(note, name), getattr(other, name))


def test_traces_that_changed_are_noticed():
    other = STORED | {"r4-2": [rollout("4-2", 1.0, (10, 11, 12), turns=3)]}
    with pytest.raises(BatchCorrupt, match="batch 7 was cut with"):
        rebuild_batch(BATCH, other.__getitem__, LAYING)
    with pytest.raises(BatchCorrupt, match=r"annotations of traces \['4-2'\]"):
        rebuild_batch(BATCH, (STORED | {"r4-2": []}).__getitem__, LAYING)


def test_bytes_that_are_no_annotations_are_refused():
    for data in (b"", BATCH.annotations[:-3], b"\x00" * 20):
        with pytest.raises(BatchCorrupt, match="batch 7 cannot be read"):
            decode_batch(replace(BATCH, annotations=data))
    with pytest.raises(BatchCorrupt, match=r"has groups \[4\], its annotations are of \[4, 1\]"):
        decode_batch(replace(BATCH, groups=(4,)))


def test_a_batch_goes_through_ledger_and_store(tmp_path):
    async def write(store):
        ledger = Ledger.open(store)
        for member, traces in groups():
            number = len(ledger.groups())
            await ledger.issue_group(GroupRecord(number, member.env, 0, 3))
            for attempt, (rollout_id, trace) in enumerate(zip(member.rollouts, traces)):
                await ledger.record_sampled(number, attempt, RolloutRecord(rollout_id, "task"), [trace])
            await ledger.record_scored(number)
        members = [
            (replace(member, group=i), member.build_forest(traces, SEQ_LEN))
            for i, (member, traces) in enumerate(groups())
        ]
        await ledger.record_batch(encode_batch(0, members, SEQ_LEN))

    with RunStore.open(tmp_path) as store:
        asyncio.run(write(store))
    with RunStore.open(tmp_path) as store:
        (stored,) = Ledger.open(store).batches()
        batch = rebuild_batch(stored, store.read_traces, LAYING)
        assert entries([batch]) == entries([rebuild_batch(BATCH, STORED.__getitem__, LAYING)])
        assert encode_trace(store.read_traces("r4-1")[0]) == encode_trace(STORED["r4-1"][0])


def test_the_counts_name_every_component():
    assert set(BATCH.counts) == set(LOSS_COMPONENTS) <= set(Targets.__slots__)
