"""The turnstile: one per round of the loop, in order, and those who leave the queue hold nobody up."""

import asyncio

from ramify.client.loop_pacer import LoopPacer


def test_one_goes_on_in_each_round_in_the_order_they_came():
    async def check() -> None:
        turnstile, rounds, passed = LoopPacer(), 0, []

        async def count() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        async def enter(name: int) -> None:
            await turnstile.wait_turn()
            passed.append((name, rounds))

        counting = asyncio.create_task(count())
        await asyncio.gather(*(enter(name) for name in range(5)))
        counting.cancel()
        assert [name for name, _ in passed] == [0, 1, 2, 3, 4]
        assert len({number for _, number in passed[1:]}) == 4

    asyncio.run(check())


def test_a_cancelled_one_is_passed_over_and_the_turnstile_opens_again():
    async def check() -> None:
        turnstile = LoopPacer()
        await turnstile.wait_turn()
        waiting = [asyncio.create_task(turnstile.wait_turn()) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[2].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*waiting, return_exceptions=True)
            await turnstile.wait_turn()
        assert [task.cancelled() for task in waiting] == [False, False, True, False]

    asyncio.run(check())


def test_a_loop_that_ended_before_the_next_turn_holds_up_nobody_in_another():
    turnstile, ended = LoopPacer(), asyncio.new_event_loop()
    entered = ended.create_task(turnstile.wait_turn())
    ended.call_soon(ended.stop)
    ended.run_forever()
    ended.close()
    assert entered.done()

    async def check() -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*(turnstile.wait_turn() for _ in range(3)))

    asyncio.run(check())
