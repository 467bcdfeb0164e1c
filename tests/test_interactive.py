"""Coroutines run to their end wherever they are asked for: in a script, and where an event loop runs already."""

import asyncio
import subprocess
import sys
import threading

import pytest

from ramify.interactive import AwaitableResult, run_coroutine


async def named_thread() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def failing() -> None:
    raise KeyError("as asked")


def test_without_a_running_loop_the_work_runs_in_the_calling_thread():
    assert run_coroutine(named_thread()) == threading.current_thread().name


def test_with_a_running_loop_the_work_runs_in_a_thread_that_ends_with_it():
    async def cell():
        return run_coroutine(named_thread())

    assert asyncio.run(cell()) == "ramify"
    assert "ramify" not in [thread.name for thread in threading.enumerate()]


def test_what_the_work_raises_is_raised_in_the_cell():
    async def cell():
        run_coroutine(failing())

    with pytest.raises(KeyError, match="as asked"):
        asyncio.run(cell())


INTERRUPTED = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts this may ignore the signal
from ramify.interactive import run_coroutine

async def endless():
    try:
        signal.raise_signal(signal.SIGINT)  # handled in the main thread, which waits for this one
        await asyncio.sleep(60)
    finally:
        print("cleaned up")

async def cell():
    run_coroutine(endless())

try:
    asyncio.new_event_loop().run_until_complete(cell())  # a kernel leaves SIGINT to Python, and asyncio.run would not
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupted_cell_cancels_its_work_and_waits_for_its_end():
    command = [
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){INTERRUPTED}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.stdout.split("\n")[:2] == ["cleaned up", "interrupted"], result.stderr


def test_a_result_may_be_awaited_and_gives_itself():
    class Result(AwaitableResult):
        pass

    result = Result()

    async def cell():
        return await result

    assert asyncio.run(cell()) is result
