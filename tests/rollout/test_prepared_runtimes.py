"""Runtimes are prepared before they are needed, each serves one rollout, and none is left behind."""

import asyncio

from ramify.core.errors import SandboxError
from ramify.env import RuntimeConfig
from ramify.rollout.prepared_runtimes import PreparedRuntimes
from ramify.rollout.runtime import LocalRuntime, LocalRuntimeConfig


class CountingRuntime(LocalRuntime):
    """A runtime that counts the calls it gets."""

    def __init__(self, config: LocalRuntimeConfig, log: list[str], *, fails: bool = False) -> None:
        super().__init__(config)
        self.log, self.fails, self.is_prepared = log, fails, False

    async def prepare(self) -> None:
        self.log.append("prepare")
        if self.fails:
            raise SandboxError("no room")
        self.is_prepared = True

    async def stop(self) -> None:
        self.log.append("stop")
        await super().stop()


def run_prepared(test, size: int, **options):
    log: list[str] = []

    async def run():
        prepared = PreparedRuntimes(lambda: CountingRuntime(LocalRuntimeConfig(), log, **options), size)
        try:
            await test(prepared)
        finally:
            await prepared.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    return log


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_runtimes_are_prepared_after_the_first_and_stopped_at_the_end():
    async def test(prepared):
        first = prepared.take()
        assert not first.is_prepared
        await settle()
        second, third = prepared.take(), prepared.take()
        assert second.is_prepared and third.is_prepared and second is not third
        await settle()

    log = run_prepared(test, 2)
    assert (log.count("prepare"), log.count("stop")) == (4, 2)  # what was taken is stopped by its rollout


def test_size_zero_prepares_nothing():
    async def test(prepared):
        prepared.take()
        await settle()

    assert run_prepared(test, 0) == []
    assert RuntimeConfig().num_prepared == 0


def test_failure_to_prepare_leaves_it_to_the_rollout():
    async def test(prepared):
        prepared.take()
        await settle()
        assert not prepared.take().is_prepared
        await settle()

    log = run_prepared(test, 1, fails=True)
    assert log.count("prepare") == log.count("stop") == 2


async def test_runtime_that_could_not_be_stopped_is_tried_again_and_reported(caplog):
    class StuckRuntime(CountingRuntime):
        async def stop(self) -> None:
            self.log.append("stop")
            raise SandboxError("its directory cannot be removed")

    log: list[str] = []

    async with asyncio.timeout(20):
        prepared = PreparedRuntimes(lambda: StuckRuntime(LocalRuntimeConfig(), log, fails=True), 1)
        prepared.take()
        await settle()
        await prepared.close()
    assert log == ["prepare", "stop", "stop"]
    assert caplog.text.count("its directory cannot be removed") == 2
