"""The heap of a worker after a large rollout."""

import asyncio

import psutil
import pytest

from ramify.envserver.heap import LARGE_ROLLOUT_BYTES, HeapTrimmer, find_malloc_trim

CHUNK, MIB = 2048, 1 << 20

pytestmark = pytest.mark.skipif(find_malloc_trim() is None, reason="this C library has no malloc_trim")


def test_memory_that_a_large_rollout_used_goes_back_to_the_system():
    process = psutil.Process()
    buffers = [bytes(CHUNK) for _ in range(128 * MIB // CHUNK)]
    newest = buffers[-1]  # what is freed below it stays with the process
    used = process.memory_info().rss
    del buffers
    kept = process.memory_info().rss

    async def end() -> int:
        heap = HeapTrimmer(delay=0.01)
        heap.on_rollout_end(LARGE_ROLLOUT_BYTES)
        heap.on_rollout_end(LARGE_ROLLOUT_BYTES)  # together with the first
        while not heap.num_trims:
            await asyncio.sleep(0.01)
        await heap.close()
        return heap.num_trims

    assert asyncio.run(end()) == 1
    assert used - kept < 32 * MIB  # it would have stayed
    assert used - process.memory_info().rss > 64 * MIB
    assert len(newest) == CHUNK


def test_small_rollouts_cost_nothing():
    async def end() -> int:
        heap = HeapTrimmer(delay=0.0)
        heap.on_rollout_end(LARGE_ROLLOUT_BYTES - 1)
        await asyncio.sleep(0.05)
        await heap.close()
        return heap.num_trims

    assert asyncio.run(end()) == 0
