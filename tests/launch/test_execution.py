"""Execution of a plan: the run directory is locked, recorded, finished and resumed."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading

import pytest

from ramify.core.display import Display
from ramify.core.errors import EnvironmentChanged, RunBusy, RunStalled, StorageFailed
from ramify.launch.execution import execute_plan
from ramify.launch.launcher import ProcessRole
from ramify.launch.plan import LaunchPlan
from ramify.launch.supervisor import RunOutcome
from ramify.orchestrate.run_config import RunConfig
from ramify.run import supervisor_lock
from ramify.run.state import RunPhase
from ramify.run.store import RunStore
from ramify.run.store.environments import ObservedEnvironment, record_environments
from ramify.run.store.run_log import RunLog
from ramify.run.supervisor_lock import lock_run
from ramify.train import weights_directory
from tests.support.display import RecordingDisplay
from tests.support.plans import plan_here
from tests.support.processes import RUNS_FOREVER, build_spec, fails_with, read_pids
from tests.support.status import make_state

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("check_plugins_in_process")]

HOLDS_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w"); fcntl.flock(file, fcntl.LOCK_EX); print("held", flush=True); sys.stdin.read()
"""

COMMITS_STEPS = """
import pathlib, sqlite3
pathlib.Path(DIR + "/run/run.sqlite.sha256").unlink(missing_ok=True)
ledger = sqlite3.connect(DIR + "/run/run.sqlite")
ledger.execute("CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
ledger.execute("REPLACE INTO marks VALUES ('committed', {steps})")
ledger.commit()
"""


def build_test_plan(tmp_path, leader: str = "", **more) -> LaunchPlan:
    """Return a plan whose processes are small programs."""
    sources = {"train": [{"taskset": {"id": "reverse-text"}}]}
    config = RunConfig(**{"name": "run", "output": tmp_path, "max_steps": 3, **sources, **more})
    specs = (
        build_spec(tmp_path, "trainer", RUNS_FOREVER, ProcessRole.FOLLOWER),
        build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    )
    return dataclasses.replace(plan_here(config), process_specs=specs)


def test_finished_run_is_not_repeated_unless_there_are_more_steps(tmp_path):
    three, four = COMMITS_STEPS.format(steps=3), COMMITS_STEPS.format(steps=4)
    first = execute_plan(build_test_plan(tmp_path, three), display=Display())
    assert (first.path, first.outcome, first.did_run) == (tmp_path / "run", RunOutcome.FINISHED, True)
    assert not execute_plan(build_test_plan(tmp_path, three), display=Display()).did_run
    assert execute_plan(build_test_plan(tmp_path, four, max_steps=4), display=Display()).did_run
    assert execute_plan(build_test_plan(tmp_path, three), fresh=True, display=Display()).did_run
    assert (tmp_path / "run.old-1").is_dir()
    assert len(read_pids(tmp_path, "orchestrator")) == 3


def test_state_of_an_earlier_start_is_not_shown(tmp_path):
    path, fifo = tmp_path / "run", tmp_path / "refreshed"
    path.mkdir()
    make_state(path, state=RunPhase.STARTING).write(path)
    os.mkfifo(fifo)
    ends_after_a_refresh = 'open(DIR + "/refreshed").read(1)' + COMMITS_STEPS.format(steps=3)
    with fifo.open("r+b", buffering=0) as pipe:
        display = RecordingDisplay(lambda state: pipe.write(b"x"))
        execute_plan(build_test_plan(tmp_path, ends_after_a_refresh), display=display)
    assert {state.orchestrator for state in display.states} == {None}


def test_exhausted_run_resumes_when_there_are_more_tasks(tmp_path):
    def run(steps: int, epochs: int | None):
        source = {"taskset": {"id": "reverse-text"}, "curriculum": {"type": "shuffle", "epochs": epochs}}
        return execute_plan(
            build_test_plan(tmp_path, COMMITS_STEPS.format(steps=steps), train=[source]), display=Display()
        )

    assert (run(1, 1).did_run, run(1, 1).did_run) == (True, False)
    assert run(1, 1).steps == 1
    again = run(2, 2)
    assert (again.did_run, again.steps) == (True, 2)
    assert run(3, None).did_run
    assert (run(3, None).did_run, run(3, None).steps) == (False, 3)


def test_failure_that_ended_a_run_is_recorded(tmp_path):
    leader = fails_with(RunStalled("none of 8 groups"))
    with pytest.raises(RunStalled):
        execute_plan(build_test_plan(tmp_path, leader), display=Display())
    with RunStore.open(tmp_path / "run", write=False) as store:
        (event,) = RunLog(store).events("failed")
    assert event.fields == {"name": "RunStalled", "message": "none of 8 groups"}


def test_changed_environment_is_refused_before_any_process_starts(tmp_path):
    def run(digest: str, **more):
        environments = {"reverse-text": {"code": {"mine.py": digest}}}
        return execute_plan(
            build_test_plan(tmp_path, COMMITS_STEPS.format(steps=3)),
            environments=environments,
            display=Display(),
            **more,
        )

    assert run("old").did_run
    with RunStore.open(tmp_path / "run") as store:  # what the orchestrator does
        record_environments(store, {"reverse-text": ObservedEnvironment({"code": {"mine.py": "old"}})}, {})
    assert not run("old").did_run
    with pytest.raises(EnvironmentChanged, match=r"reverse-text: mine\.py has changed"):
        run("new")
    assert len(read_pids(tmp_path, "orchestrator")) == 1
    assert not run("new", accept_changes=True).did_run


def test_run_record_has_status_address_and_processes(tmp_path):
    plan = build_test_plan(tmp_path, "sys.exit(9 if len(open(DIR + '/orchestrator.pids').readlines()) == 1 else 0)")
    display = RecordingDisplay()
    execute_plan(plan, display=display)
    record = json.loads((tmp_path / "run" / "supervisor.json").read_text())
    assert record["status_address"] == plan.status_address
    assert record["processes"]["orchestrator"]["restarts"] == 1
    assert record["processes"]["orchestrator"]["state"] == "ended"
    assert set(record["versions"]) == {"ramify", "python"}
    line = "orchestrator ended with exit code 9; restarting in 0.5 s (restart 1 of 10)"
    assert display.lines == [line]
    assert display.states
    assert line in (tmp_path / "run" / "logs" / "launch.log").read_text()


def test_run_directory_has_one_supervisor(tmp_path):
    with lock_run(tmp_path / "run"):
        pass
    lock = str(tmp_path / ".run.lock")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_LOCK, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunBusy, match="in use by another"):
            execute_plan(build_test_plan(tmp_path), display=Display())
    finally:
        other.communicate()


def test_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageFailed, match=r"run cannot be locked: No locks available"), lock_run(tmp_path / "run"):
        pass


def test_start_waits_for_processes_of_a_killed_supervisor(tmp_path):
    plan = build_test_plan(tmp_path)
    held = RunStore.open(tmp_path / "run")
    threading.Timer(0.3, held.close).start()
    assert execute_plan(plan, display=Display()).outcome is RunOutcome.FINISHED


@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit(75)", fails_with(RunStalled("x"))])
def test_shared_memory_weights_are_removed_and_saved_if_finished(tmp_path, monkeypatch, ends):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(weights_directory, "SHM_ROOT", shared)
    weights = weights_directory.get_weights_directory(tmp_path / "run", "shm")
    published = f"os.makedirs('{weights}/0-000003'); open('{weights}/0-000003/manifest.json', 'w').write(M)"
    manifest = '{"policy": "p", "incarnation": 0, "step": 3, "files": {}}'
    plan = build_test_plan(tmp_path, f"M = '{manifest}'; {published}; {ends}", weights={"transport": "shm"})
    (shared / f"ramify-{'0' * 16}").mkdir()  # of a run that was killed
    with contextlib.suppress(RunStalled):
        execute_plan(plan, display=Display())
    assert list(shared.iterdir()) == []
    assert (tmp_path / "run" / "weights" / "0-000003").exists() == ("exit(0)" in ends)


def test_time_of_the_lock_is_that_of_the_supervisors_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_lock.time, "time", lambda: 1_000_000.0)
    with lock_run(tmp_path / "run"):
        supervisor = supervisor_lock.find_supervisor(tmp_path / "run")
    assert supervisor is not None and supervisor.locked_at == 1_000_000.0
