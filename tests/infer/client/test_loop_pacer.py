"""One task continues per iteration of the event loop, in order; cancelled tasks are skipped."""

import asyncio

from ramify.infer.client.http_client import LoopPacer


async def test_one_task_continues_per_iteration_in_order():
    pacer, iterations, continued = LoopPacer(), 0, []

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    async def wait(name: int) -> None:
        await pacer.wait_turn()
        continued.append((name, iterations))

    counting = asyncio.create_task(count())
    await asyncio.gather(*(wait(name) for name in range(5)))
    counting.cancel()
    assert [name for name, _ in continued] == [0, 1, 2, 3, 4]
    assert len({number for _, number in continued[1:]}) == 4


async def test_cancelled_tasks_are_skipped():
    pacer = LoopPacer()
    await pacer.wait_turn()
    waiting = [asyncio.create_task(pacer.wait_turn()) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting, return_exceptions=True)
        await pacer.wait_turn()
    assert [task.cancelled() for task in waiting] == [False, False, True, False]


def test_a_loop_that_ended_does_not_block_tasks_of_another():
    pacer, ended = LoopPacer(), asyncio.new_event_loop()
    entered = ended.create_task(pacer.wait_turn())
    ended.call_soon(ended.stop)
    ended.run_forever()
    ended.close()
    assert entered.done()

    async def check() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(pacer.wait_turn() for _ in range(3)))

    asyncio.run(check())
