"""Coroutines run to completion in a script and in a thread that already runs an event loop."""

import asyncio
import subprocess
import sys
import threading

import pytest

from ramify.interactive import AwaitableResult, run_coroutine


async def get_thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def failing() -> None:
    raise KeyError("expected")


def test_without_a_loop_the_coroutine_runs_in_the_calling_thread():
    assert run_coroutine(get_thread_name()) == threading.current_thread().name


def test_with_a_loop_the_coroutine_runs_in_a_thread_that_ends_with_it():
    async def cell():
        return run_coroutine(get_thread_name())

    assert asyncio.run(cell()) == "ramify"
    assert "ramify" not in [thread.name for thread in threading.enumerate()]


def test_exceptions_of_the_coroutine_are_raised_in_the_caller():
    async def cell():
        run_coroutine(failing())

    with pytest.raises(KeyError, match="expected"):
        asyncio.run(cell())


INTERRUPTED = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
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


@pytest.mark.process
def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_cleanup():
    command = [
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){INTERRUPTED}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.stdout.split("\n")[:2] == ["cleaned up", "interrupted"], result.stderr


INTERRUPTED_TWICE = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
from ramify.interactive import run_coroutine

async def endless():
    try:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(3600)
    finally:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)  # a long cleanup, such as a last checkpoint
        finally:
            print("ended at once")

async def cell():
    run_coroutine(endless())

try:
    asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.process
def test_a_second_interrupt_cancels_the_cleanup():
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.stdout.split("\n")[:2] == ["ended at once", "interrupted"], result.stderr


def test_awaiting_a_result_returns_it():
    class Result(AwaitableResult):
        pass

    result = Result()

    async def cell():
        return await result

    assert asyncio.run(cell()) is result
