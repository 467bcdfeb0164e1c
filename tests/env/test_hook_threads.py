"""Threads for code that blocks: how many there are, and that nobody waits for another's."""

import asyncio
import contextlib
import contextvars
import threading

import pytest

from ramify.env.hook_threads import MAX_THREADS, run_in_hook_thread


def run(work):
    async def within():
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(within())


def test_jobs_that_wait_for_each_other_all_run():
    together = threading.Barrier(MAX_THREADS)

    async def test():
        await asyncio.gather(*(run_in_hook_thread(together.wait, {"timeout": 10}) for _ in range(MAX_THREADS)))

    run(test())


def test_jobs_that_are_done_in_a_moment_share_a_thread():
    async def test():
        return [await run_in_hook_thread(threading.get_ident, {}) for _ in range(50)]

    assert len(set(run(test()))) == 1


def test_threads_leave_when_nothing_waits_any_more():
    together, before = threading.Barrier(8), threading.active_count()

    async def test():
        await asyncio.gather(*(run_in_hook_thread(together.wait, {"timeout": 10}) for _ in range(8)))
        while await run_in_hook_thread(threading.active_count, {}) > before + 1:
            await asyncio.sleep(0)

    run(test())


def test_more_jobs_than_threads_are_all_done():
    async def test():
        return await asyncio.gather(
            *(run_in_hook_thread(lambda number: number, {"number": n}) for n in range(5 * MAX_THREADS))
        )

    assert run(test()) == list(range(5 * MAX_THREADS))


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("x")])
def test_what_a_job_raises_is_raised_where_it_is_waited_for(error):
    def fails():
        raise error

    with pytest.raises(type(error)) as caught:
        run(run_in_hook_thread(fails, {}))
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_job_that_wants_to_end_the_process_only_fails(error):
    def leaves():
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        run(run_in_hook_thread(leaves, {}))


def test_a_job_that_ends_an_iteration_does_not_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(run_in_hook_thread(lambda: next(iter(())), {}))


def test_a_job_sees_the_context_of_whoever_asked():
    name = contextvars.ContextVar("name", default="nobody")

    async def test():
        name.set("me")
        return await run_in_hook_thread(name.get, {})

    assert run(test()) == "me"


def test_a_job_that_is_cancelled_before_it_began_never_begins():
    holding, ran = threading.Event(), []

    async def test():
        first = asyncio.create_task(run_in_hook_thread(holding.wait, {"timeout": 10}))
        second = asyncio.create_task(run_in_hook_thread(lambda: ran.append(1), {}))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        holding.set()
        await first
        await run_in_hook_thread(lambda: None, {})

    run(test())
    assert not ran


def test_a_loop_ends_although_a_job_still_blocks():
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def blocks():
        began.set()
        release.wait(10)
        ended.set()

    async def test():
        waiting = asyncio.create_task(run_in_hook_thread(blocks, {}))
        await run_in_hook_thread(began.wait, {"timeout": 10})
        waiting.cancel()

    run(test())
    release.set()
    assert ended.wait(10)


def test_code_that_never_returns_does_not_use_up_the_threads():
    never = threading.Event()

    async def test():
        for _ in range(MAX_THREADS + 1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await run_in_hook_thread(never.wait, {"timeout": 20})
        together = threading.Barrier(MAX_THREADS)
        await asyncio.gather(*(run_in_hook_thread(together.wait, {"timeout": 10}) for _ in range(MAX_THREADS)))

    try:
        run(test())
    finally:
        never.set()


def test_a_thread_that_comes_back_from_a_job_nobody_waits_for_leaves():
    never, before = threading.Event(), threading.active_count()

    async def test():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await run_in_hook_thread(never.wait, {"timeout": 20})
        assert await run_in_hook_thread(lambda: 7, {}) == 7
        never.set()
        while threading.active_count() > before + 1:
            await asyncio.sleep(0.01)
        return [await run_in_hook_thread(threading.get_ident, {}) for _ in range(50)]

    assert len(set(run(test()))) == 1
