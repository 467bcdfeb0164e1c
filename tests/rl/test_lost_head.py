"""A run whose head is lost continues on another one, from shared storage; a head that lives on is refused."""

import contextlib
import random
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from ramify.launch.head import read_local_state
from ramify.run.fencing.token import FencingToken
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from tests.support.processes import is_running, kill_tree
from tests.support.runs import command, run_command, write_config

pytestmark = [
    pytest.mark.run,
    pytest.mark.full("minutes; tests/launch has the parts"),
    pytest.mark.timeout(1200),
]

STEPS = 6
TIMEOUT = 400.0
OPTIONS = ["--cluster.shared_directory", "shared", "--checkpoint.interval", "1"]
SAVED = ["before the first commit", "after a commit", "while a checkpoint is saved", "at a random moment"]


@contextlib.contextmanager
def start_head(home: Path, name: str):
    """Start the command with an output directory of its own, and end it with all its processes."""
    with (home / f"{name}.txt").open("w") as output:
        arguments = command("rl", "@", "rl.toml", "-o", name, *OPTIONS)
        process = subprocess.Popen(arguments, cwd=home, stdout=output, stderr=output)
        try:
            yield process
        finally:
            kill_head(process)


def kill_head(process: subprocess.Popen) -> None:
    """Kill a head as a power failure does: all processes of the machine at once."""
    kill_tree(process.pid)
    process.wait(timeout=60)


def wait_for(condition, home: Path, name: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, (home / f"{name}.txt").read_text()[-3000:]
        time.sleep(0.02)


def count_entries(home: Path, term: int) -> int:
    return sum(path.name.isdecimal() for path in home.glob(f"shared/run/ledger/{term}/*"))


def read_commits(run: Path) -> dict[int, FencingToken]:
    """Return the token of the trainer that committed each version, by a reading of the database alone."""
    with contextlib.closing(sqlite3.connect(f"file:{run / 'run.sqlite'}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT version, incarnation FROM commits").fetchall()
    return {version: FencingToken.from_number(number) for version, number in rows}


def check_finished(home: Path, head: str, num_heads: int) -> None:
    audit = run_command("why", f"{head}/run", "--audit", cwd=home)
    assert audit.returncode == 0, audit.stdout
    assert f"{STEPS} steps: no problems" in audit.stdout
    commits = read_commits(home / head / "run")
    assert list(commits) == list(range(1, STEPS + 1))  # every step is in the history once
    assert sorted(commits.values()) == list(commits.values())
    assert read_local_state(home / head / "run").term == num_heads - 1
    with RunStore.open(home / head / "run", write=False) as store:
        trained = [group.number for group in Ledger.open_readonly(store).groups() if group.step is not None]
    assert len(trained) == STEPS * 4 == len(set(trained))


@pytest.mark.parametrize("moment", SAVED)
def test_command_repeated_elsewhere_continues_a_lost_run(tmp_path, moment):
    home = write_config(tmp_path, steps=STEPS, max_staleness=2)
    conditions = {
        "before the first commit": lambda: count_entries(home, 0) >= 1,
        "after a commit": lambda: count_entries(home, 0) >= 3,
        "while a checkpoint is saved": lambda: list(home.glob("shared/run/checkpoints/.step_000002*")),
        "at a random moment": lambda: count_entries(home, 0) >= 2,
    }
    with start_head(home, "a") as process:
        wait_for(conditions[moment], home, "a")
        if moment == "at a random moment":
            time.sleep(random.random())
        kill_head(process)
    committed = {version for version in read_commits(home / "a/run") if count_entries(home, 0) > version + 1}
    (home / "a").rename(home / "lost")
    with start_head(home, "b") as process:
        wait_for(lambda: process.poll() is not None, home, "b")
    text = (home / "b.txt").read_text()
    assert process.returncode == 0, text[-3000:]
    assert "this head begins term 1 of the run, after step" in text
    check_finished(home, "b", num_heads=2)
    assert {version for version, token in read_commits(home / "b/run").items() if token.term == 0} >= committed
    if max(read_commits(home / "b/run").values()).term:  # at a random moment all steps may be committed
        assert (home / f"b/run/weights/1.0-{STEPS:06}").is_dir()
        assert (home / f"shared/run/checkpoints/step_{STEPS:06}-1.0").is_dir()
    shutil.rmtree(home / "b")
    again = run_command("rl", "@", "rl.toml", "-o", "c", *OPTIONS, cwd=home)
    assert "is already finished" in again.stdout, again.stdout + again.stderr


def test_head_that_lives_on_is_refused_and_stops_its_processes(tmp_path):
    home = write_config(tmp_path, steps=STEPS, max_staleness=2)
    with start_head(home, "a") as old:
        wait_for(lambda: count_entries(home, 0) >= 2, home, "a")
        children = psutil.Process(old.pid).children(recursive=True)
        with start_head(home, "b") as new:
            wait_for(lambda: old.poll() is not None, home, "a")
            text = (home / "a.txt").read_text()
            assert old.returncode == 1, text[-3000:]
            assert "ProcessReplaced: " in text, text[-3000:]
            assert "a newer head took over" in text
            wait_for(lambda: not any(is_running(child.pid) for child in children), home, "a")
            wait_for(lambda: new.poll() is not None, home, "b")
            assert new.returncode == 0, (home / "b.txt").read_text()[-3000:]
    check_finished(home, "b", num_heads=2)


def test_stopped_head_that_wakes_up_is_refused(tmp_path):
    """A machine that was suspended continues beside its replacement, in the middle of what it did."""
    home = write_config(tmp_path, steps=STEPS, max_staleness=2)
    with start_head(home, "a") as old:
        wait_for(lambda: count_entries(home, 0) >= 2, home, "a")
        processes = [psutil.Process(old.pid), *psutil.Process(old.pid).children(recursive=True)]
        for process in processes:
            process.suspend()
        with start_head(home, "b") as new:
            wait_for(lambda: count_entries(home, 1) >= 1, home, "b")
            for process in processes:
                process.resume()
            wait_for(lambda: old.poll() is not None and new.poll() is not None, home, "b")
            assert new.returncode == 0, (home / "b.txt").read_text()[-3000:]
            assert "ProcessReplaced: " in (home / "a.txt").read_text()
    check_finished(home, "b", num_heads=2)
