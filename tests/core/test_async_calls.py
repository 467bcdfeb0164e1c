"""Timeouts, retries and cancellation of asyncio tasks."""

import asyncio
import contextlib
import contextvars
import threading

import pytest

from ramify.core import async_calls
from ramify.core.async_calls import (
    SingleThreadCaller,
    call_storage,
    cancel_all,
    fail_after,
    map_in_daemon_threads,
    retry,
)
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProviderError, StorageFailed
from ramify.core.files import unless_abandoned, write_atomically


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


async def test_call_to_storage_that_hangs_is_named_and_does_not_block():
    answers = threading.Event()
    assert await call_storage(lambda: 3, "the number", timeout=60.0) == 3
    try:
        with pytest.raises(StorageFailed, match=r"status.json: the storage did not answer within 0.05 s; check"):
            await call_storage(answers.wait, "status.json", timeout=0.05)
    finally:
        answers.set()


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError("of the mount")])
async def test_call_to_storage_passes_the_errors_of_the_call(error):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        await call_storage(fail, "status.json", timeout=60.0)


@pytest.mark.parametrize("end", ["timeout", "cancellation"])
async def test_call_to_storage_that_was_given_up_changes_nothing_later(tmp_path, end):
    started, answers, threads = threading.Event(), threading.Event(), []

    def write():
        threads.append(threading.current_thread())
        started.set()
        answers.wait(60)
        write_atomically(tmp_path / "status.json", "late")

    task = asyncio.create_task(call_storage(write, "status.json", timeout=0.5 if end == "timeout" else 60.0))
    await asyncio.to_thread(started.wait, 60)
    if end == "cancellation":
        task.cancel()
    with pytest.raises(StorageFailed if end == "timeout" else asyncio.CancelledError):
        await task
    answers.set()
    threads[0].join(60)
    assert list(tmp_path.iterdir()) == []


async def test_call_to_storage_that_has_succeeded_is_not_abandoned(tmp_path):
    context = await call_storage(contextvars.copy_context, "status.json", timeout=60.0)
    context.run(write_atomically, tmp_path / "status.json", "later")
    assert (tmp_path / "status.json").read_text() == "later"


@pytest.mark.parametrize("hangs", [False, True])
async def test_call_to_storage_waits_for_a_change_that_has_begun_unless_it_hangs(monkeypatch, hangs):
    monkeypatch.setattr(async_calls, "CHANGE_TIMEOUT", 0.05 if hangs else 60.0)
    begun, answers, changes = threading.Event(), threading.Event(), []

    def rename():
        with unless_abandoned():
            begun.set()
            assert answers.wait(60)
            changes.append("renamed")

    task = asyncio.create_task(call_storage(rename, "status.json", timeout=60.0))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    if not hangs:
        asyncio.get_running_loop().call_later(0.05, answers.set)  # the loop must not be blocked
    with pytest.raises(asyncio.CancelledError):
        await task
    assert changes == ([] if hangs else ["renamed"])
    answers.set()


async def test_call_that_is_repeated_while_the_last_one_hangs_starts_no_thread():
    answers, calls = threading.Event(), []

    def read():
        calls.append(threading.current_thread())
        assert answers.wait(60)
        return len(calls)

    caller = SingleThreadCaller()
    try:
        for _ in range(3):
            with pytest.raises(StorageFailed):
                await call_storage(read, "status.json", timeout=0.2, caller=caller)
    finally:
        answers.set()
    assert await call_storage(read, "status.json", timeout=60.0, caller=caller) == 2


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_results_of_threads_are_in_the_order_of_the_items(num_items):
    assert map_in_daemon_threads(lambda item: -item, range(num_items), max_threads=3) == [-i for i in range(num_items)]


def test_error_of_a_thread_is_raised():
    def fail(item):
        assert threading.current_thread().daemon
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        map_in_daemon_threads(fail, range(5), max_threads=2)


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
