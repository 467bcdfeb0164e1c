"""An engine waits while a trainer on its GPU computes, and only then."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.processes.training_lock import TRAINING_LOCK_VARIABLE, TrainingLock

HOLD_FOREVER = """
import sys, time
from pathlib import Path
from ramify.processes.training_lock import TrainingLock
with TrainingLock(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_is_held_during_a_step_by_any_number_of_ranks(tmp_path):
    engine, ranks = TrainingLock(tmp_path / "lock"), [TrainingLock(tmp_path / "lock") for _ in range(2)]
    assert not engine.should_wait()
    with ranks[0].hold():
        with ranks[1].hold():
            assert engine.should_wait()
        assert engine.should_wait()
    assert not engine.should_wait()


@pytest.mark.process
def test_a_killed_trainer_releases_the_lock(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD_FOREVER, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            assert TrainingLock(path).should_wait()
        finally:
            holder.kill()
    assert not TrainingLock(path).should_wait()


def test_a_lock_that_is_held_too_long_is_ignored(tmp_path):
    with TrainingLock(tmp_path / "lock").hold():
        assert TrainingLock(tmp_path / "lock").should_wait()
        assert not TrainingLock(tmp_path / "lock", hold_timeout=0.0).should_wait()


def test_a_trainer_does_not_wait_for_an_engine_that_is_stopped_with_the_lock(tmp_path):
    warnings: list[str] = []
    with (tmp_path / "lock").open("w") as engine:
        fcntl.flock(engine, fcntl.LOCK_EX)
        with TrainingLock(tmp_path / "lock", acquire_timeout=0.05).hold(warnings.append):
            assert len(warnings) == 1 and "trains without waiting" in warnings[0]
    with TrainingLock(tmp_path / "lock").hold(warnings.append):
        assert len(warnings) == 1


def test_without_the_variable_there_is_no_lock(monkeypatch, tmp_path):
    monkeypatch.delenv(TRAINING_LOCK_VARIABLE, raising=False)
    with TrainingLock.from_environment().hold():
        assert not TrainingLock.from_environment().should_wait()
    monkeypatch.setenv(TRAINING_LOCK_VARIABLE, str(tmp_path / "lock"))
    with TrainingLock.from_environment().hold():
        assert TrainingLock(Path(tmp_path / "lock")).should_wait()
