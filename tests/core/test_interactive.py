"""Coroutines run to completion in a script and in a thread that already runs an event loop."""

import asyncio
import subprocess
import sys
import threading

import pytest

from ramify.core.interactive import AwaitableResult, run_coroutine


async def get_thread() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


async def failing() -> None:
    raise KeyError("expected")


def test_without_a_loop_the_coroutine_runs_in_the_calling_thread():
    assert run_coroutine(get_thread()) is threading.current_thread()


async def test_with_a_loop_the_coroutine_runs_in_a_thread_that_ends_with_it():
    thread = run_coroutine(get_thread())
    assert thread.name == "ramify" and not thread.is_alive()


async def test_exceptions_of_the_coroutine_are_raised_in_the_caller():
    with pytest.raises(KeyError, match="expected"):
        run_coroutine(failing())


INTERRUPTED = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
from ramify.core.interactive import run_coroutine

async def endless():
    try:
        signal.raise_signal(signal.SIGINT)  # handled in the main thread, which waits for this one
        await asyncio.sleep(3600)
    finally:
        try:
            if {is_interrupted_twice}:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(3600)  # a long cleanup, such as a last checkpoint
        finally:
            print("cleaned up")

async def cell():
    run_coroutine(endless())

try:
    asyncio.new_event_loop().run_until_complete(cell())  # a kernel leaves SIGINT to Python, and asyncio.run would not
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.process
@pytest.mark.parametrize("is_interrupted_twice", [False, True])
def test_an_interrupt_cancels_the_coroutine_and_a_second_one_its_cleanup(is_interrupted_twice):
    command = [sys.executable, "-c", INTERRUPTED.format(is_interrupted_twice=is_interrupted_twice)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.stdout.split("\n")[:2] == ["cleaned up", "interrupted"], result.stderr


async def test_awaiting_a_result_returns_it():
    class Result(AwaitableResult):
        pass

    result = Result()
    assert await result is result
