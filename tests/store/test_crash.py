"""Whatever a crash leaves of the files, what was acknowledged is there and nothing is there by halves."""

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ramify.store import RunStore
from tests.store.rollouts import replies, rollout

SEGMENT, WAL = "traces/000000.seg", "run.sqlite-wal"
COMMITS = 12


@dataclass(frozen=True)
class Lived:
    """The files of a run at the moment it was killed, and how long they were after each commit."""

    files: dict[str, bytes]
    segment: list[int]
    wal: list[int]


@cache
def lived() -> Lived:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with RunStore.open(path) as store:
            segment, wal = [], []
            for number in range(COMMITS):
                asyncio.run(store.add_rollout(*rollout(number, text=f"reply {number} " * (number + 1))))
                segment.append((path / SEGMENT).stat().st_size)
                wal.append((path / WAL).stat().st_size)
            files = {name: (path / name).read_bytes() for name in (SEGMENT, WAL, "run.sqlite")}
    return Lived(files, segment, wal)


@st.composite
def crashes(draw):
    """(acknowledged, length of the WAL, length of the segment, what was torn behind them)."""
    run = lived()
    known = draw(st.integers(0, COMMITS - 1))
    wal = draw(st.integers(run.wal[known], run.wal[-1]))
    whole = sum(length <= wal for length in run.wal)  # commits that reached the disk, told to somebody or not
    segment = draw(st.integers(run.segment[whole - 1], run.segment[-1]))
    return known + 1, wal, segment, draw(st.binary(max_size=40)), draw(st.binary(max_size=40))


def expected(count: int) -> dict[str, str]:
    return {f"r{number}": f"reply {number} " * (number + 1) for number in range(count)}


@given(crashes())
def test_a_crash_loses_nothing_acknowledged_and_shows_nothing_half(crash):
    acknowledged, wal, segment, torn_wal, torn_segment = crash
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "traces").mkdir()
        for name, data in lived().files.items():
            (path / name).write_bytes(data)
        (path / WAL).write_bytes(lived().files[WAL][:wal] + torn_wal)
        (path / SEGMENT).write_bytes(lived().files[SEGMENT][:segment] + torn_segment)
        with RunStore.open(path) as store:
            found = replies(store)
            assert len(found) >= acknowledged
            assert found == expected(len(found))
            asyncio.run(store.add_rollout(*rollout(len(found), text=f"reply {len(found)} " * (len(found) + 1))))
        with RunStore.open(path, write=False) as store:
            assert replies(store) == expected(len(found) + 1)


def test_frames_without_a_row_are_cut_when_the_run_is_opened(tmp_path):
    with RunStore.open(tmp_path) as store:
        asyncio.run(store.add_rollout(*rollout(0)))
    known = (tmp_path / SEGMENT).stat().st_size
    with (tmp_path / SEGMENT).open("ab") as file:
        file.write(os.urandom(100))
    shutil.copy(tmp_path / SEGMENT, tmp_path / "traces/000001.seg")
    with RunStore.open(tmp_path) as store:
        assert (tmp_path / SEGMENT).stat().st_size == known
        assert (tmp_path / "traces/000001.seg").stat().st_size == 0
        assert replies(store) == {"r0": "reply 0"}
