"""What a starting orchestrator waits for, as the supervisor reads it from `status.json`."""

import threading

import pytest

from ramify.core.async_calls import SingleThreadCaller
from ramify.launch import last_state
from ramify.launch.last_state import read_startup_wait
from ramify.orchestrate.snapshot import SNAPSHOT_FILE, write_snapshot

WAIT = {"who": "orchestrator", "waits_for": "models.teacher at http://h:1", "since_s": 5.0, "deadline_s": 600.0}


@pytest.mark.parametrize(
    ("state", "wait", "text"),
    [
        ("starting", WAIT, "the orchestrator waits for models.teacher at http://h:1, up to 600 s"),
        ("starting", {**WAIT, "deadline_s": None}, "the orchestrator waits for models.teacher at http://h:1"),
        ("starting", {**WAIT, "since_s": 0.0}, ""),
        ("running", WAIT, ""),
    ],
)
async def test_wait_is_described_once_it_has_lasted(tmp_path, state, wait, text):
    assert await read_startup_wait(tmp_path, earlier=None) == ""
    write_snapshot(tmp_path, {"state": state}, [wait])
    assert await read_startup_wait(tmp_path, earlier=None) == text


async def test_storage_that_hangs_neither_blocks_the_supervisor_nor_collects_threads(tmp_path, monkeypatch):
    answers, reads = threading.Event(), []

    def hang(path):
        reads.append(path)
        answers.wait(60)

    caller = SingleThreadCaller()
    monkeypatch.setattr(last_state, "read_snapshot", hang)
    try:
        texts = [await read_startup_wait(tmp_path, None, caller, timeout=0.2) for _ in range(2)]
    finally:
        answers.set()
    assert texts == [f"{tmp_path / SNAPSHOT_FILE} could not be read within 0.2 s"] * 2
    assert len(reads) == 1
