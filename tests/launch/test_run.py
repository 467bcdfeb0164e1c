"""A run's directory around its processes: claimed, recorded, finished, continued."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading

import pytest

from ramify.errors import ConfigInvalid, EnvironmentChanged, NoTrainableGroups, RunBusy, RunStalled
from ramify.launch.carrying import carry_out, claim
from ramify.launch.dashboard import Quiet
from ramify.launch.plan import Plan, plan_of
from ramify.launch.process import Role
from ramify.launch.supervisor import Outcome
from ramify.orchestrate.config import RunConfig
from ramify.store import RunStore
from ramify.store.environments import ObservedEnvironment, record_environments
from ramify.store.run_log import RunLog
from ramify.train import weights_directory
from tests.launch.scripts import FOR_EVER, entry, pids

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w"); fcntl.flock(file, fcntl.LOCK_EX); print("held", flush=True); sys.stdin.read()
"""

COMMITS = """
import sqlite3
ledger = sqlite3.connect(DIR + "/run/run.sqlite")
ledger.execute("CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
ledger.execute("REPLACE INTO marks VALUES ('committed', {steps})")
ledger.commit()
"""


def planned(tmp_path, leader: str = "", **more) -> Plan:
    """A plan whose processes are small programs."""
    sources = {"train": [{"taskset": {"id": "reverse-text"}}]}
    config = RunConfig(**{"name": "run", "output": tmp_path, "max_steps": 3, **sources, **more})
    entries = (
        entry(tmp_path, "trainer", FOR_EVER, Role.FOLLOWER),
        entry(tmp_path, "orchestrator", leader, Role.LEADER),
    )
    return dataclasses.replace(plan_of(config, gpus=[]), entries=entries)


class Heard(Quiet):
    def __init__(self):
        self.said, self.looks = [], 0

    def say(self, line):
        self.said.append(line)

    def look(self, status, processes):
        self.looks += 1


def test_a_run_is_finished_once_and_goes_on_when_there_is_more_to_do(tmp_path):
    three, four = COMMITS.format(steps=3), COMMITS.format(steps=4)
    first = carry_out(planned(tmp_path, three), display=Quiet())
    assert (first.path, first.outcome, first.ran) == (tmp_path / "run", Outcome.FINISHED, True)
    assert not carry_out(planned(tmp_path, three), display=Quiet()).ran
    assert carry_out(planned(tmp_path, four, max_steps=4), display=Quiet()).ran
    assert carry_out(planned(tmp_path, three), fresh=True, display=Quiet()).ran
    assert (tmp_path / "run.old-1").is_dir()
    assert len(pids(tmp_path, "orchestrator")) == 3


def test_a_run_whose_tasks_ended_says_how_many_steps_it_has_and_goes_on_when_there_are_more(tmp_path):
    def run(steps: int, epochs: int | None):
        source = {"taskset": {"id": "reverse-text"}, "curriculum": {"type": "shuffle", "epochs": epochs}}
        return carry_out(planned(tmp_path, COMMITS.format(steps=steps), train=[source]), display=Quiet())

    assert (run(1, 1).ran, run(1, 1).ran) == (True, False)
    assert run(1, 1).steps == 1
    again = run(2, 2)
    assert (again.ran, again.steps) == (True, 2)
    assert run(3, None).ran
    assert (run(3, None).ran, run(3, None).steps) == (False, 3)


def test_the_name_under_which_a_run_ended_is_recorded(tmp_path):
    leader = 'import sys; print("NoTrainableGroups: none of 8 groups"); sys.exit(1)'
    with pytest.raises(NoTrainableGroups):
        carry_out(planned(tmp_path, leader), display=Quiet())
    with RunStore.open(tmp_path / "run", write=False) as store:
        (event,) = RunLog(store).events("failed")
    assert event.fields == {"name": "NoTrainableGroups", "message": "none of 8 groups"}


def test_another_run_under_the_same_name_is_refused(tmp_path):
    carry_out(planned(tmp_path), display=Quiet())
    with pytest.raises(ConfigInvalid, match=r"train.reverse-text.taskset.max_chars: was not set, now 5"):
        other = {"train": [{"taskset": {"id": "reverse-text", "max_chars": 5}}]}
        carry_out(planned(tmp_path, **other), display=Quiet())


def test_a_changed_environment_is_refused_before_anything_is_started_also_where_all_steps_are_there(tmp_path):
    def run(digest: str, **more):
        environments = {"reverse-text": {"code": {"mine.py": digest}}}
        return carry_out(planned(tmp_path, COMMITS.format(steps=3)), environments=environments, display=Quiet(), **more)

    assert run("old").ran
    with RunStore.open(tmp_path / "run") as store:  # what the orchestrator does
        record_environments(store, {"reverse-text": ObservedEnvironment({"code": {"mine.py": "old"}})}, {})
    assert not run("old").ran
    with pytest.raises(EnvironmentChanged, match=r"reverse-text: mine\.py has changed"):
        run("new")
    assert len(pids(tmp_path, "orchestrator")) == 1
    assert not run("new", accept_changes=True).ran


def test_the_record_says_where_the_run_can_be_asked_and_what_became_of_its_processes(tmp_path):
    plan = planned(tmp_path, "sys.exit(9 if len(open(DIR + '/orchestrator.pids').readlines()) == 1 else 0)")
    heard = Heard()
    carry_out(plan, display=heard)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == plan.status
    assert record["processes"]["orchestrator"]["restarts"] == 1
    assert record["processes"]["orchestrator"]["state"] == "ended"
    assert set(record["versions"]) == {"ramify", "python"}
    line = "orchestrator ended with exit code 9; started again in 0.5 s (1 of 10)"
    assert heard.said == [line]
    assert heard.looks
    assert line in (tmp_path / "run" / "logs" / "launch.log").read_text()


def test_a_run_has_one_supervisor(tmp_path):
    with claim(tmp_path / "run"):
        pass
    lock = str(tmp_path / ".run.lock")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunBusy, match="already being run"):
            carry_out(planned(tmp_path), display=Quiet())
    finally:
        other.communicate()


def test_it_waits_for_what_a_killed_supervisor_has_left_to_end(tmp_path):
    plan = planned(tmp_path)
    held = RunStore.open(tmp_path / "run")
    threading.Timer(0.3, held.close).start()
    assert carry_out(plan, display=Quiet()).outcome is Outcome.FINISHED


@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit(75)", "print('RunStalled: x'); sys.exit(1)"])
def test_weights_in_memory_end_with_the_run_and_a_finished_one_leaves_them_on_the_disk(tmp_path, monkeypatch, ends):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(weights_directory, "SHARED", shared)
    weights = weights_directory.get_weights_directory(tmp_path / "run", "shm")
    published = f"os.makedirs('{weights}/0-000003'); open('{weights}/0-000003/manifest.json', 'w').write(M)"
    manifest = '{"policy": "p", "incarnation": 0, "step": 3, "files": {}}'
    plan = planned(tmp_path, f"M = '{manifest}'; {published}; {ends}", weights={"transport": "shm"})
    (shared / f"ramify-{'0' * 16}").mkdir()  # of a run that was killed
    with contextlib.suppress(RunStalled):
        carry_out(plan, display=Quiet())
    assert list(shared.iterdir()) == []
    assert (tmp_path / "run" / "weights" / "0-000003").exists() == ("exit(0)" in ends)
