"""Timeouts, retries and cancellation of asyncio tasks."""

import asyncio
import contextlib
import threading

import pytest

from ramify.core.async_calls import (
    call_storage,
    cancel_all,
    fail_after,
    map_in_daemon_threads,
    retry,
    unwrap_exception_group,
    wait_for_event,
)
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProviderError


async def test_fail_after_names_the_operation():
    for what in ("boot", lambda: "boot"):
        with pytest.raises(DeadlineExceeded, match=r"boot took longer than 0.01 s"):
            async with fail_after(0.01, what):
                await asyncio.Event().wait()


async def test_fail_after_passes_a_timeout_error_of_the_block():
    with pytest.raises(TimeoutError, match="of the block"):
        async with fail_after(60.0, "boot"):
            raise TimeoutError("of the block")


@pytest.mark.parametrize(
    ("failures", "num_calls", "raises"),
    [
        ([], 1, None),
        ([ProviderError("1"), ProviderError("2")], 3, None),
        ([ProviderError("1"), ProviderError("2"), ProviderError("3")], 3, ProviderError),
        ([ConfigInvalid("never")], 1, ConfigInvalid),
    ],
)
async def test_retry_repeats_only_retryable_failures(failures, num_calls, raises):
    calls = []

    async def call():
        calls.append(len(calls))
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]
        return "result"

    with contextlib.nullcontext() if raises is None else pytest.raises(raises):
        assert await retry(call, max_retries=2, backoff=0.0) == "result"
    assert len(calls) == num_calls


async def test_cancelled_call_to_storage_ends_after_its_thread():
    started, answers, written = threading.Event(), threading.Event(), []

    def write():
        started.set()
        answers.wait(60)
        written.append("status")

    task = asyncio.create_task(call_storage(write, "orchestrator.json"))
    await asyncio.to_thread(started.wait, 60)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, answers.set)  # the loop must not be blocked
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written == ["status"]


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_results_of_threads_are_in_the_order_of_the_items(num_items):
    assert map_in_daemon_threads(lambda item: -item, range(num_items), max_threads=3) == [-i for i in range(num_items)]


def test_error_of_a_thread_is_raised():
    def fail(item):
        assert threading.current_thread().daemon
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        map_in_daemon_threads(fail, range(5), max_threads=2)


async def test_event_is_awaited_no_longer_than_the_timeout():
    event = asyncio.Event()
    assert not await wait_for_event(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_for_event(event, 60.0)


async def test_cancel_all_waits_until_the_tasks_have_ended():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
            raise ValueError("dropped")

    tasks = [asyncio.create_task(work()) for _ in range(2)]
    await asyncio.sleep(0)
    await cancel_all(tasks)
    assert ended == [True, True]


def test_the_named_failure_is_found_in_nested_groups():
    failure = ProviderError("refused")
    nested = ExceptionGroup("outer", [ValueError("bug"), ExceptionGroup("inner", [ExceptionGroup("core", [failure])])])
    assert unwrap_exception_group(nested) is failure
    bug = ValueError("bug")
    assert unwrap_exception_group(ExceptionGroup("outer", [ExceptionGroup("inner", [bug])])) is bug
