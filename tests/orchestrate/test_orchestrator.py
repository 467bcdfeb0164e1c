"""The end of a run: final evals and stop requests."""

import asyncio

import pytest

from ramify.errors import RunStalled
from ramify.orchestrate.orchestrator import run_unless_stopped


async def run(stop: bool, work) -> bool:
    """Run `work`; if `stop`, with a stop request shortly after its start."""
    stop_requested = asyncio.Event()
    if stop:
        asyncio.get_running_loop().call_later(0.01, stop_requested.set)
    async with asyncio.timeout(10):
        return await run_unless_stopped(stop_requested, work)


def test_stop_cancels_the_final_evals():
    cancelled: list[bool] = []

    async def evals() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cancelled.append(True)

    assert not asyncio.run(run(True, evals()))
    assert cancelled == [True]


def test_failure_of_the_final_evals_is_raised():
    async def fails() -> None:
        raise RunStalled("it")

    assert asyncio.run(run(False, asyncio.sleep(0.01)))
    with pytest.raises(RunStalled):
        asyncio.run(run(False, fails()))
