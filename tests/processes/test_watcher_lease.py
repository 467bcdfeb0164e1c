"""The watcher kills a process tree when its lease ends, whatever the process and its parent are doing."""

import os
import signal
import subprocess
import sys

import pytest

from ramify.processes.child import ChildProcess
from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import read_lease_clock
from tests.processes.test_child import PYTHON, STARTS_DAEMON
from tests.support.processes import async_wait_until, is_running, wait_until_ended

pytestmark = [pytest.mark.process, pytest.mark.promise]

LEASE = 0.5  # seconds
IGNORES_SIGTERM = f"import signal; signal.signal(15, signal.SIG_IGN){STARTS_DAEMON}"
# A parent that grants its child one lease when it is told to, and then stops itself.
STOPPED_PARENT = """
import asyncio, os, signal, sys
from ramify.run.fencing.lease import read_lease_clock
from ramify.processes.child import ChildProcess

async def main():
    child = ChildProcess()
    await child.spawn(sys.argv[2:], 1)
    sys.stdin.readline()
    child.set_lease_end(read_lease_clock() + float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


async def start(tmp_path, code: str, lease_end: float | None) -> tuple[ChildProcess, list[int]]:
    """Start a program that prints pids, and return these."""
    child, log = ChildProcess(), ProcessLog(tmp_path / "log")
    if lease_end is not None:
        child.set_lease_end(lease_end)
    with log.open() as output:
        await child.spawn((*PYTHON, code), output.fileno())
    await async_wait_until(lambda: log.tail().count(" ") == 1 and not log.tail().startswith("("), "the pids")
    return child, [int(pid) for pid in log.tail().split()]


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_tree_is_killed_when_the_lease_ends(tmp_path, is_stopped):
    child, pids = await start(tmp_path, IGNORES_SIGTERM, None)
    if is_stopped:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    lease_end = read_lease_clock() + LEASE
    child.set_lease_end(lease_end)
    assert await child.wait() == 128 + signal.SIGKILL
    assert read_lease_clock() >= lease_end
    assert not any(map(is_running, pids))
    await child.stop()


async def test_renewed_lease_keeps_the_process(tmp_path):
    child, pids = await start(tmp_path, STARTS_DAEMON, None)
    first_end = read_lease_clock() + 2.0
    child.set_lease_end(first_end)
    child.set_lease_end(first_end + 60)
    await async_wait_until(lambda: read_lease_clock() > first_end + 0.2)
    assert child.poll() is None
    child.set_lease_end(read_lease_clock() + LEASE)
    assert await child.wait() == 128 + signal.SIGKILL
    assert not any(map(is_running, pids))
    await child.stop()


async def test_stop_ends_a_process_before_its_lease(tmp_path):
    child, _ = await start(tmp_path, STARTS_DAEMON, read_lease_clock() + 60)
    assert await child.stop() == 128 + signal.SIGTERM
    child.set_lease_end(read_lease_clock())  # nobody is there any more


async def test_lease_that_has_ended_kills_at_once(tmp_path):
    child = ChildProcess()
    child.set_lease_end(read_lease_clock() - 1)
    with (tmp_path / "log").open("wb") as output:
        await child.spawn((*PYTHON, "import signal; signal.pause()"), output.fileno())
    assert await child.wait() == 128 + signal.SIGKILL
    await child.stop()


def test_lease_ends_while_the_parent_is_stopped():
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED_PARENT, str(LEASE), *PYTHON, IGNORES_SIGTERM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.stdin.write("grant\n")
        parent.stdin.flush()
        wait_until_ended(*pids)
        assert parent.poll() is None
    finally:
        parent.kill()
        parent.communicate(timeout=60)
