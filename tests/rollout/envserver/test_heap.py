"""The heap of a worker after a large rollout."""

import asyncio

import psutil
import pytest

from ramify.rollout.envserver.env_worker import LARGE_ROLLOUT_BYTES, HeapTrimmer, find_malloc_trim

CHUNK, MIB = 2048, 1 << 20

pytestmark = pytest.mark.skipif(find_malloc_trim() is None, reason="this C library has no malloc_trim")


async def test_memory_of_a_large_rollout_is_returned_to_the_system():
    process = psutil.Process()
    buffers = [bytes(CHUNK) for _ in range(128 * MIB // CHUNK)]
    newest = buffers[-1]  # what is freed below it stays with the process
    rss_before_free = process.memory_info().rss
    del buffers
    rss_after_free = process.memory_info().rss

    async def end_rollouts() -> int:
        trimmer = HeapTrimmer(delay=0.01)
        trimmer.on_rollout_end(LARGE_ROLLOUT_BYTES)
        trimmer.on_rollout_end(LARGE_ROLLOUT_BYTES)  # together with the first
        while not trimmer.num_trims:
            await asyncio.sleep(0.01)
        await trimmer.close()
        return trimmer.num_trims

    assert await end_rollouts() == 1
    assert rss_before_free - rss_after_free < 32 * MIB  # it would have stayed
    assert rss_before_free - process.memory_info().rss > 64 * MIB
    assert len(newest) == CHUNK


async def test_small_rollouts_do_not_trim():
    async def end_rollouts() -> int:
        trimmer = HeapTrimmer(delay=0.0)
        trimmer.on_rollout_end(LARGE_ROLLOUT_BYTES - 1)
        await asyncio.sleep(0.05)
        await trimmer.close()
        return trimmer.num_trims

    assert await end_rollouts() == 0
