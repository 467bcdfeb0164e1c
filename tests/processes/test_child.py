"""A child process is started, watched and stopped with all its descendants, however its parent ends."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.core.errors import DeadlineExceeded, ProcessDied
from ramify.processes.child import WATCHER_COMMAND, ChildProcess, wait_until_ready
from ramify.processes.exit import EXIT_NOT_STARTED
from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import read_lease_clock
from tests.support.processes import is_running, wait_until_ended

pytestmark = pytest.mark.process

PYTHON = (sys.executable, "-S", "-c")
RUNS_FOREVER = "import signal; print('up', flush=True)\nwhile 1: signal.pause()"
IGNORES_SIGTERM = f"import signal; signal.signal(15, signal.SIG_IGN)\n{RUNS_FOREVER}"
# A process with a daemon in another session; it prints the pids of both.
STARTS_DAEMON = """
import os, signal, subprocess, sys
daemon = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
print(os.getpid(), daemon.pid, flush=True)
signal.pause()
"""
PARENT = """
import asyncio, sys
from ramify.processes.child import ChildProcess

async def main():
    child = ChildProcess(stop_timeout=1.0)
    await child.spawn(sys.argv[1:], 1)
    await child.wait()

asyncio.run(main())
"""


async def start(tmp_path: Path, *command: str, stop_timeout: float = 5.0) -> tuple[ChildProcess, ProcessLog]:
    child, log = ChildProcess(stop_timeout=stop_timeout), ProcessLog(tmp_path / "logs" / "child.log")
    with log.open() as output:
        await child.spawn(command, output.fileno())
    return child, log


async def wait_until_up(child: ChildProcess, log: ProcessLog) -> None:
    async def is_up() -> bool:
        return log.tail() == "up"

    assert await wait_until_ready(child.poll, is_up, timeout=60, poll_interval=0.01)


async def test_stop_sends_sigterm_then_sigkill(tmp_path):
    for code, number in ((RUNS_FOREVER, signal.SIGTERM), (IGNORES_SIGTERM, signal.SIGKILL)):
        child, log = await start(tmp_path, *PYTHON, code, stop_timeout=0.5 if number == signal.SIGKILL else 20.0)
        await wait_until_up(child, log)
        assert child.poll() is None
        assert await child.stop() == 128 + number
        assert not is_running(child.pid)


async def test_cancelled_stop_kills_the_process(tmp_path):
    child, log = await start(tmp_path, *PYTHON, IGNORES_SIGTERM, stop_timeout=60.0)
    await wait_until_up(child, log)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.stop(), 0.1)
    wait_until_ended(child.pid)


async def test_stop_before_start_does_nothing():
    assert await ChildProcess().stop() is None


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_signal_to_a_starting_process_is_sent_when_its_pid_is_known(tmp_path, is_cancelled):
    child = ChildProcess()
    with (tmp_path / "log").open("wb") as output:
        starting = asyncio.create_task(child.spawn((*PYTHON, RUNS_FOREVER), output.fileno()))
        await asyncio.sleep(0)
        assert child.pid == 0
        child.send_signal(signal.SIGTERM)
        if is_cancelled:  # as if the run ended now: nobody but `wait` reads the pid
            starting.cancel()
        await asyncio.gather(starting, return_exceptions=is_cancelled)
    assert await asyncio.wait_for(child.wait(), 60) == 128 + signal.SIGTERM
    await child.stop()


async def test_process_whose_watcher_reports_nothing_is_refused_and_killed(tmp_path):
    child = ChildProcess(stop_timeout=0.1, start_timeout=0.3)
    log = ProcessLog(tmp_path / "child.log")
    with log.open() as output, pytest.raises(DeadlineExceeded, match=r"did not start within 0.3 s"):
        await child.spawn((*PYTHON, IGNORES_SIGTERM), output.fileno(), command_forks_watcher=True)
    await wait_until_up(child, log)
    pid = child._watcher_pid  # of the command, which never became a watcher
    assert is_running(pid)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.stop(), 0.1)  # a cancelled stop kills it, too
    wait_until_ended(pid)


async def test_command_that_the_system_refuses_has_a_named_error(tmp_path):
    child = ChildProcess()
    with (
        (tmp_path / "log").open("wb") as output,
        pytest.raises(ProcessDied, match=r"true cannot be started: .*too long"),
    ):
        await child.spawn(("true", "x" * (1 << 20)), output.fileno())
    assert await child.stop() is None


def test_kill_before_start_does_not_kill_the_caller():
    code = """
import asyncio
from ramify.processes import child
child.KILL_TIMEOUT = 0.0
asyncio.run(child.ChildProcess().kill())
"""
    assert subprocess.run([sys.executable, "-c", code], start_new_session=True, timeout=60).returncode == 0


async def test_process_that_exits_or_hangs_is_not_ready(tmp_path):
    async def never() -> bool:
        return False

    child, _ = await start(tmp_path, *PYTHON, "pass")
    assert not await wait_until_ready(child.poll, never, timeout=60, poll_interval=0.01)
    await child.stop()
    child, _ = await start(tmp_path, *PYTHON, RUNS_FOREVER)
    with pytest.raises(TimeoutError, match=r"not ready within 0.1 s"):
        await wait_until_ready(child.poll, never, timeout=0.1, poll_interval=0.01)
    await child.stop()


def test_killed_parent_leaves_no_process():
    code = f"import signal; signal.signal(15, signal.SIG_IGN){STARTS_DAEMON}"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *PYTHON, code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait(60)
    wait_until_ended(*pids)
    parent.stdout.close()


def test_log_shows_the_last_lines_since_it_was_opened(tmp_path):
    log = ProcessLog(tmp_path / "logs" / "a.log", append=True)
    assert log.tail() == "(no log)"
    with log.open() as file:
        file.write(b"before\n")
    with log.open() as file:
        assert log.tail() == "(nothing)"
        file.write(b"".join(b"line %d\n" % number for number in range(40)))
    assert log.tail().splitlines() == [f"line {number}" for number in range(10, 40)]
    assert log.tail(None).startswith("line 0\n")
    assert log.describe_tail().startswith(f"last lines of {tmp_path}/logs/a.log:\nline 10\n")
    assert (tmp_path / "logs" / "a.log").read_bytes().startswith(b"before\n")


# -- a detached watcher --------------------------------------------------------------------------------------------

# Runs its arguments as soon as a file exists.
WAITS_FOR_FILE = 'while [ ! -e "$0" ]; do sleep 0.01; done; exec "$@"'
LATE_WATCHER = """
import os, pathlib, sys, time
from ramify.processes.watcher import exec_command, fork_under_watcher
if os.fork():
    os._exit(0)
os.setsid()
deadline = time.monotonic() + 60
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
fork_under_watcher(stop_timeout=float(sys.argv[3]))
exec_command(sys.argv[4:])
"""


@pytest.fixture
def blocked_watcher(tmp_path) -> tuple[str, ...]:
    """The command of a detached watcher that is not executed before there is a file."""
    return ("sh", "-c", WAITS_FOR_FILE, str(tmp_path / "file"), *WATCHER_COMMAND)


@pytest.fixture
def late_watcher(tmp_path) -> dict:
    """Options of a child whose detached watcher waits for a file before it does anything."""
    return {"start_timeout": 2.0, "watcher_command": (sys.executable, "-c", LATE_WATCHER, str(tmp_path / "file"))}


async def test_start_of_a_detached_watcher_does_not_block_the_loop(tmp_path, blocked_watcher):
    child = ChildProcess(is_detached=True, watcher_command=blocked_watcher)
    with ProcessLog(tmp_path / "log").open() as output:
        starting = asyncio.create_task(child.spawn((*PYTHON, RUNS_FOREVER), output.fileno()))
        while child._control_socket is None:  # the watcher is being started
            await asyncio.sleep(0)
        (tmp_path / "file").touch()
        await starting
    assert await child.stop() == 128 + signal.SIGTERM


async def test_detached_watcher_that_does_not_start_in_time_is_named_and_killed(tmp_path, blocked_watcher):
    command = (*PYTHON, f"open({str(tmp_path / 'started')!r}, 'w')")
    child = ChildProcess(is_detached=True, start_timeout=0.2, watcher_command=blocked_watcher)
    with ProcessLog(tmp_path / "log").open() as output, pytest.raises(DeadlineExceeded, match=r"did not start within"):
        await child.spawn(command, output.fileno())
    assert await child.stop() == EXIT_NOT_STARTED
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and _mentions(path, tmp_path)]
    assert pids == []


async def test_start_that_timed_out_is_no_exit_until_its_watcher_is_gone(tmp_path, late_watcher):
    child = ChildProcess(is_detached=True, **late_watcher)
    child.set_lease_end(read_lease_clock() + 60)
    with ProcessLog(tmp_path / "log").open() as output, pytest.raises(DeadlineExceeded, match=r"did not start within"):
        await child.spawn((*PYTHON, f"open({str(tmp_path / 'started')!r}, 'w')"), output.fileno())
    assert not child.has_exited  # its watcher may still start it
    child.request_stop()
    assert not child.has_exited
    (tmp_path / "file").touch()
    assert await child.wait() == EXIT_NOT_STARTED
    assert child.has_exited
    await child.stop()
    assert not (tmp_path / "started").exists()


async def test_process_that_starts_after_its_timeout_can_be_stopped(tmp_path, late_watcher):
    child, log = ChildProcess(is_detached=True, **late_watcher), ProcessLog(tmp_path / "log")
    with log.open() as output, pytest.raises(DeadlineExceeded, match=r"did not start within"):
        await child.spawn((*PYTHON, RUNS_FOREVER), output.fileno())
    (tmp_path / "file").touch()
    await wait_until_up(child, log)
    assert child.pid and not child.has_exited
    assert await child.stop() == 128 + signal.SIGTERM


def _mentions(process: Path, text: Path) -> bool:
    """Return whether the command line of a process contains a path."""
    try:
        return str(text).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
