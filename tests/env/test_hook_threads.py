"""The number of hook threads, and that blocking jobs do not delay others."""

import asyncio
import contextlib
import contextvars
import threading

import pytest

from ramify.env.hook import MAX_THREADS, run_in_hook_thread


def count_hook_threads() -> int:
    return sum(thread.name == "hook" for thread in threading.enumerate())


async def test_jobs_that_wait_for_each_other_all_run():
    barrier = threading.Barrier(MAX_THREADS)
    await asyncio.gather(*(run_in_hook_thread(barrier.wait, {"timeout": 60}) for _ in range(MAX_THREADS)))


async def test_short_jobs_share_one_thread():
    assert len({await run_in_hook_thread(threading.get_ident, {}) for _ in range(50)}) == 1


async def test_threads_exit_when_no_job_is_queued():
    barrier, before = threading.Barrier(8), count_hook_threads()
    async with asyncio.timeout(60):
        await asyncio.gather(*(run_in_hook_thread(barrier.wait, {"timeout": 60}) for _ in range(8)))
        while await run_in_hook_thread(count_hook_threads, {}) > before + 1:
            await asyncio.sleep(0)


async def test_more_jobs_than_threads_all_finish():
    jobs = (run_in_hook_thread(lambda number: number, {"number": n}) for n in range(5 * MAX_THREADS))
    assert await asyncio.gather(*jobs) == list(range(5 * MAX_THREADS))


async def test_error_of_a_job_is_raised_in_the_waiting_task():
    with pytest.raises(KeyError, match="x"):
        await run_in_hook_thread(lambda: {}["x"], {})


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_job_that_tries_to_exit_the_process_only_fails(error):
    def leaves():
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await run_in_hook_thread(leaves, {})


async def test_job_that_raises_stop_iteration_does_not_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):
        async with asyncio.timeout(60):
            await run_in_hook_thread(lambda: next(iter(())), {})


async def test_job_sees_the_context_variables_of_its_caller():
    name = contextvars.ContextVar("name", default="nobody")
    name.set("me")
    assert await run_in_hook_thread(name.get, {}) == "me"


async def test_job_cancelled_before_it_started_never_starts():
    release, started = threading.Event(), []
    first = asyncio.create_task(run_in_hook_thread(release.wait, {"timeout": 60}))
    second = asyncio.create_task(run_in_hook_thread(lambda: started.append(1), {}))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await first
    await run_in_hook_thread(lambda: None, {})
    assert not started


def test_event_loop_closes_while_a_job_still_blocks():
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def blocks():
        started.set()
        release.wait(60)
        finished.set()

    async def test():
        waiting = asyncio.create_task(run_in_hook_thread(blocks, {}))
        await run_in_hook_thread(started.wait, {"timeout": 60})
        waiting.cancel()

    asyncio.run(test())  # the loop closes here
    release.set()
    assert finished.wait(60)


async def test_jobs_that_never_return_do_not_use_up_the_threads():
    release = threading.Event()
    try:
        for _ in range(MAX_THREADS + 1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await run_in_hook_thread(release.wait, {"timeout": 60})
        barrier = threading.Barrier(MAX_THREADS)
        await asyncio.gather(*(run_in_hook_thread(barrier.wait, {"timeout": 60}) for _ in range(MAX_THREADS)))
    finally:
        release.set()


async def test_thread_of_a_cancelled_job_exits_when_the_job_returns():
    release, before = threading.Event(), count_hook_threads()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.02):
            await run_in_hook_thread(release.wait, {"timeout": 60})
    assert await run_in_hook_thread(lambda: 7, {}) == 7
    release.set()
    async with asyncio.timeout(60):
        while count_hook_threads() > before + 1:
            await asyncio.sleep(0.01)
    assert len({await run_in_hook_thread(threading.get_ident, {}) for _ in range(50)}) == 1
