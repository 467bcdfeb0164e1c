"""The watchdog of `ramify eval`: time in which the process is suspended does not count."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import wait_until

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio
from pathlib import Path

from ramify.rollout.evals import blocked_loop

blocked_loop.TIMER_MARGIN = 3.0


async def main(watchdog_thread):
    with watchdog_thread.watch():
        print("running", flush=True)
        while not Path("continued").exists():
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)


with blocked_loop.LoopWatchdog(0.5, "advice") as watchdog_thread:
    asyncio.run(main(watchdog_thread))
print("ended by itself")
"""


def test_suspended_time_does_not_count_as_hanging(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(4.0)  # longer than the timer, which must not fire
        (tmp_path / "continued").touch()
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "ended by itself\n")
