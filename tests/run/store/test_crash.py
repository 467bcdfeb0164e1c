"""After a crash every acknowledged rollout is there, and none is incomplete."""

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.run.store import RunStore
from tests.support.traces import make_rollout, read_replies

pytestmark = pytest.mark.promise

SEGMENT, WAL = "traces/000000.seg", "run.sqlite-wal"
NUM_COMMITS = 12


@dataclass(frozen=True)
class KilledRun:
    """The files of a run when it was killed, and the lengths of segment and WAL after each commit."""

    files: dict[str, bytes]
    segment_lengths: list[int]
    wal_lengths: list[int]


@cache
def make_killed_run() -> KilledRun:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with RunStore.open(path) as store:
            segment_lengths, wal_lengths = [], []
            for number in range(NUM_COMMITS):
                asyncio.run(store.add_rollout(*make_rollout(number, text=f"reply {number} " * (number + 1))))
                segment_lengths.append((path / SEGMENT).stat().st_size)
                wal_lengths.append((path / WAL).stat().st_size)
            files = {name: (path / name).read_bytes() for name in (SEGMENT, WAL, "run.sqlite")}
    return KilledRun(files, segment_lengths, wal_lengths)


@st.composite
def crashes(draw):
    """Draw (acknowledged commits, WAL length, segment length, garbage after the WAL, garbage after the segment)."""
    run = make_killed_run()
    last_acknowledged = draw(st.integers(0, NUM_COMMITS - 1))
    wal = draw(st.integers(run.wal_lengths[last_acknowledged], run.wal_lengths[-1]))
    num_durable = sum(length <= wal for length in run.wal_lengths)  # acknowledged or not
    segment = draw(st.integers(run.segment_lengths[num_durable - 1], run.segment_lengths[-1]))
    return last_acknowledged + 1, wal, segment, draw(st.binary(max_size=40)), draw(st.binary(max_size=40))


def expected(count: int) -> dict[str, str]:
    return {f"r{number}": f"reply {number} " * (number + 1) for number in range(count)}


@given(crashes())
def test_a_crash_keeps_acknowledged_rollouts_and_shows_no_incomplete_ones(crash):
    acknowledged, wal, segment, torn_wal, torn_segment = crash
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "traces").mkdir()
        for name, data in make_killed_run().files.items():
            (path / name).write_bytes(data)
        (path / WAL).write_bytes(make_killed_run().files[WAL][:wal] + torn_wal)
        (path / SEGMENT).write_bytes(make_killed_run().files[SEGMENT][:segment] + torn_segment)
        with RunStore.open(path) as store:
            count = len(read_replies(store))
            assert count >= acknowledged
            assert read_replies(store) == expected(count)
            asyncio.run(store.add_rollout(*make_rollout(count, text=f"reply {count} " * (count + 1))))
        with RunStore.open(path, write=False) as store:
            assert read_replies(store) == expected(count + 1)


def test_frames_without_a_record_are_truncated_on_open(tmp_path):
    with RunStore.open(tmp_path) as store:
        asyncio.run(store.add_rollout(*make_rollout(0)))
    committed = (tmp_path / SEGMENT).stat().st_size
    with (tmp_path / SEGMENT).open("ab") as file:
        file.write(os.urandom(100))
    shutil.copy(tmp_path / SEGMENT, tmp_path / "traces/000001.seg")
    with RunStore.open(tmp_path) as store:
        assert (tmp_path / SEGMENT).stat().st_size == committed
        assert (tmp_path / "traces/000001.seg").stat().st_size == 0
        assert read_replies(store) == {"r0": "reply 0"}
