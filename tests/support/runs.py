"""Runs of `ramify rl` as a user starts them, and one finished run that all tests of a session only read.

In the finished run, the trainer was killed and the orchestrator stopped: whatever a test finds in it was kept by
processes that were replaced.
"""

import contextlib
import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

FULL = bool(os.environ.get("RAMIFY_FULL"))
TIMEOUT = 240.0  # seconds for one command

SETTINGS = """
name = "run"
max_steps = {steps}
seq_len = 256
record_batches = true

[orchestrator]
batch_size = 8
group_size = 4
max_staleness = {max_staleness}

[trainer]
record_token_stats = true

[trainer.optim]
lr = 1e-4

[checkpoint]
interval = {interval}

[launch]
max_restarts = 100

[[train]]
name = "warm"
taskset = {{ id = "reverse-text", num_tasks = 16 }}
sampling = {{ temperature = 1.0, max_tokens = 40 }}
max_turns = 1
"""
SECOND_TEMPERATURE = """
[[train]]
name = "cool"
taskset = { id = "reverse-text", num_tasks = 16, seed = 1 }
sampling = { temperature = 0.7, max_tokens = 40 }
max_turns = 1
"""
HELD_OUT = """
[[eval]]
name = "held-out"
taskset = { id = "reverse-text", split = "eval" }
sampling = { max_tokens = 40 }
num_tasks = 4
max_turns = 1
"""
FINISHED_STEPS = 4  # of the finished run
FAULT_FLAGS = ["--launch.hang_timeout", "8", "--weights.transport", "ipc"]


def command(*args: str) -> list[str]:
    """Return the command line of a ramify command."""
    return [sys.executable, "-m", "ramify", *args]


def run_command(*args: str, cwd: Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def write_config(home: Path, *, steps: int, max_staleness: int, interval: int = 2, more: str = "") -> Path:
    """Write `rl.toml` with one source of reverse-text, and return the directory."""
    settings = SETTINGS.format(steps=steps, max_staleness=max_staleness, interval=interval)
    (home / "rl.toml").write_text(settings + more)
    return home


def read_values(run: Path, name: str) -> list[float]:
    """Return the values of a metric of a run, by step."""
    from ramify.run.reader import read_metrics

    return [point.value for point in read_metrics(run, name)]


def run_with_faults(home: Path, roles: Sequence[str], *flags: str, timeout: float = TIMEOUT) -> None:
    """Run `rl.toml` to its end, and kill or, if it is the orchestrator, stop a process of each role in turn.

    One fault follows each committed step. Writes `output.txt`, `faults.txt` (the roles) and `why.txt` (the pid of the
    stopped orchestrator, and what `ramify why` printed meanwhile).
    """
    from ramify.cli import main

    run, faults = home / "outputs" / "run", list[str]()
    arguments = command("rl", "@", "rl.toml", *FAULT_FLAGS, *flags)
    with (home / "output.txt").open("w") as output:
        process = subprocess.Popen(arguments, cwd=home, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + timeout
            while process.poll() is None:
                assert time.monotonic() < deadline, (home / "output.txt").read_text()[-3000:]
                time.sleep(0.05)
                if len(faults) == len(roles) or count_committed_steps(run) <= len(faults):
                    continue
                role = roles[len(faults)]
                for victim in find_processes(process.pid, role)[-1:]:  # the command, not its watcher
                    victim.send_signal(signal.SIGSTOP if role == "orchestrator" else signal.SIGKILL)
                    faults.append(role)
                    if role == "orchestrator":
                        with contextlib.redirect_stdout(io.StringIO()) as why:
                            assert main(["why", str(run)]) == 0
                        (home / "why.txt").write_text(f"{victim.pid}\n{why.getvalue()}")
        finally:
            process.kill()
            process.wait()
    (home / "faults.txt").write_text(" ".join(faults))
    assert process.returncode == 0, (home / "output.txt").read_text()[-3000:]


def find_processes(parent: int, role: str) -> list[psutil.Process]:
    """Return the processes of a run with this role: the name of a command, or `worker` for an env server's workers."""
    text = "envserver" if role == "worker" else f"ramify {role} "
    processes = []
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            processes += [child] if text in " ".join(child.cmdline()) else []
    return processes


def count_committed_steps(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max((int(path.name[5:11]) for path in (run / "checkpoints").glob("step_*")), default=0)
    return 0


def share_finished_run(factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the finished run; the first worker of a session that asks makes it, others wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    home, failure = base / "finished_run", base / "finished_run.failure"
    with (base / "finished_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for at most the timeout of the command
        if not home.exists():
            failure.write_text("the run did not end")
            home.mkdir()
            sources = SECOND_TEMPERATURE + HELD_OUT
            write_config(home, steps=FINISHED_STEPS, max_staleness=0, interval=1, more=sources)
            try:
                run_with_faults(home, ["trainer", "orchestrator"])
            except AssertionError as error:
                failure.write_text(str(error))
            else:
                failure.unlink()
    assert not failure.exists(), failure.read_text()
    return home / "outputs" / "run"
