"""The end of a run, and those who come before it."""

import asyncio

import pytest

from ramify.errors import RunStalled
from ramify.orchestrate.orchestrator import run_unless_stopped


async def story(leave: bool, work) -> bool:
    leaving = asyncio.Event()
    if leave:
        asyncio.get_running_loop().call_later(0.01, leaving.set)
    async with asyncio.timeout(10):
        return await run_unless_stopped(leaving, work)


def test_whoever_leaves_does_not_wait_for_the_last_evals_and_they_have_ended():
    ended: list[bool] = []

    async def evals() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    assert not asyncio.run(story(True, evals()))
    assert ended == [True]


def test_the_last_evals_end_a_run_and_their_failure_is_its_own():
    async def fails() -> None:
        raise RunStalled("it")

    assert asyncio.run(story(False, asyncio.sleep(0.01)))
    with pytest.raises(RunStalled):
        asyncio.run(story(False, fails()))
