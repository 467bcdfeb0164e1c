"""Timeouts, retries and cancellation of asyncio tasks."""

import asyncio
import threading

import pytest

from ramify.async_calls import call_storage, cancel_all, fail_after, retry
from ramify.errors import ConfigInvalid, DeadlineExceeded, ProviderError, StorageFailed


def test_fail_after_names_the_operation():
    async def wait(what):
        async with fail_after(0.01, what):
            await asyncio.Event().wait()

    for what in ("boot", lambda: "boot"):
        with pytest.raises(DeadlineExceeded, match=r"boot took longer than 0.01 s"):
            asyncio.run(wait(what))


def test_fail_after_passes_a_timeout_error_of_the_block():
    async def run():
        async with fail_after(60.0, "boot"):
            raise TimeoutError("of the block")

    with pytest.raises(TimeoutError, match="of the block"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("failures", "num_calls", "raises"),
    [
        ([], 1, None),
        ([ProviderError("1"), ProviderError("2")], 3, None),
        ([ProviderError("1"), ProviderError("2"), ProviderError("3")], 3, ProviderError),
        ([ConfigInvalid("never")], 1, ConfigInvalid),
    ],
)
def test_retry_repeats_only_retryable_failures(failures, num_calls, raises):
    calls = []

    async def call():
        calls.append(len(calls))
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]
        return "result"

    async def run():
        return await retry(call, max_retries=2, backoff=0.0)

    if raises is None:
        assert asyncio.run(run()) == "result"
    else:
        with pytest.raises(raises):
            asyncio.run(run())
    assert len(calls) == num_calls


def test_call_to_storage_that_hangs_is_named_and_does_not_block():
    answers = threading.Event()

    async def run():
        assert await call_storage(lambda: 3, "the number", timeout=60.0) == 3
        await call_storage(answers.wait, "status.json", timeout=0.05)

    try:
        with pytest.raises(StorageFailed, match=r"status.json: the storage did not answer within 0.05 s; check"):
            asyncio.run(run())
    finally:
        answers.set()


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError("of the mount")])
def test_call_to_storage_passes_the_errors_of_the_call(error):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(call_storage(fail, "status.json", timeout=60.0))


def test_cancel_all_waits_until_the_tasks_have_ended():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
            raise ValueError("dropped")

    async def run():
        tasks = [asyncio.create_task(work()) for _ in range(2)]
        await asyncio.sleep(0)
        await cancel_all(tasks)
        assert ended == [True, True]

    asyncio.run(run())
