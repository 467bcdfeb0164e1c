"""The parts of the state of a run: their files, and what a starting orchestrator waits for."""

import pytest
from msgspec.structs import replace

from ramify.core.errors import StorageFailed
from ramify.run.state import OrchestratorState, ProcessState, ProcessStatus, RunPhase, SupervisorState, Wait
from tests.support.status import STATE

WAIT = Wait("orchestrator", "models.teacher at http://h:1", 5.0, 600.0)


@pytest.mark.parametrize(
    ("phase", "wait", "text"),
    [
        ("starting", WAIT, "the orchestrator waits for models.teacher at http://h:1, up to 600 s"),
        ("starting", replace(WAIT, deadline_s=None), "the orchestrator waits for models.teacher at http://h:1"),
        ("starting", replace(WAIT, since_s=0.0), ""),
        ("running", WAIT, ""),
    ],
)
def test_startup_wait_is_described_once_it_has_lasted(phase, wait, text):
    assert replace(STATE, state=RunPhase(phase), waits=[wait]).startup_wait == text


def test_parts_are_read_as_they_were_written(tmp_path):
    assert OrchestratorState.read(tmp_path) is None and SupervisorState.read(tmp_path) is None
    status = ProcessStatus("trainer", ProcessState.SILENT, 7, node="host2", token="3.1", replacement_delay=70.0)
    state = SupervisorState.begin(tmp_path, "http://127.0.0.1:1").with_processes([status])
    state.write(tmp_path)
    STATE.write(tmp_path)
    assert (SupervisorState.read(tmp_path), OrchestratorState.read(tmp_path)) == (state, STATE)


@pytest.mark.parametrize("text", ["[]", '{"status": 1}', '{"run": "x", "step": 1', '{"state": "dreaming"}'])
def test_a_damaged_file_is_not_read(tmp_path, text):
    for part in (SupervisorState, OrchestratorState):
        (tmp_path / part.FILE).write_text(text)
    assert OrchestratorState.read(tmp_path) is None
    assert SupervisorState.read(tmp_path) in (None, SupervisorState())


def test_an_absent_file_and_one_that_cannot_be_read_are_told_apart(tmp_path):
    assert SupervisorState.load(tmp_path) is None
    (tmp_path / SupervisorState.FILE).write_text("{")
    with pytest.raises(StorageFailed, match=r"supervisor\.json, which lists .* remove it if none"):
        SupervisorState.load(tmp_path)
