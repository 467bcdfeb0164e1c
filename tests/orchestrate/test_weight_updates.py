"""The engines get the newest version, one at a time, and no version is removed while an engine may read it."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from ramify.core.async_calls import cancel_all
from ramify.core.errors import ProviderError, WeightsRefused
from ramify.orchestrate.weight_updates import UpdateSettings, WeightUpdater
from ramify.trace.version import PolicyVersion
from tests.support.clock import FakeClock
from tests.support.orchestrator import FakeEngines


def version(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion("p", incarnation, step)


class Stage:
    """A weight updater, the engines it updates, and the versions it applied."""

    def __init__(self, retry_delay: float = 0.01, copy_timeout: float = 20.0) -> None:
        self.clock = FakeClock()
        self.engines, self.applied, self.applied_event = FakeEngines(), list[PolicyVersion](), asyncio.Event()
        self.updater = WeightUpdater(
            self.engines,
            self._on_applied,
            settings=UpdateSettings(retry_delay, copy_timeout=copy_timeout),
            clock=self.clock,
        )  # type: ignore[arg-type]

    def _on_applied(self, version: PolicyVersion, seconds: float) -> None:
        self.applied.append(version)
        self.applied_event.set()

    def publish(self, *versions: PolicyVersion) -> None:
        for version in versions:
            self.updater.request_update(version, Path(str(version.step)))

    async def wait_until_served(self, version: PolicyVersion) -> None:
        async with asyncio.timeout(10):
            while self.updater.served_version != version:
                await self.applied_event.wait()
                self.applied_event.clear()

    async def wait_until_called(self) -> None:
        async with asyncio.timeout(10):
            await self.engines.called.wait()
        self.engines.called.clear()


@contextlib.asynccontextmanager
async def open_stage(**options):
    """Return a stage whose updater runs."""
    stage = Stage(**options)
    running = asyncio.create_task(stage.updater.run())
    try:
        yield stage
    finally:
        await cancel_all([running])


@pytest.fixture
async def stage():
    async with open_stage() as stage:
        yield stage


async def test_superseded_version_is_never_applied(stage):
    stage.publish(version(1), version(2))
    await stage.wait_until_served(version(2))
    assert stage.applied == [version(2)]


async def test_version_being_applied_stays_in_use_while_another_is_pending(stage):
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    await stage.wait_until_called()
    stage.publish(version(2))
    assert stage.updater.versions_in_use == [version(1), version(2)]
    stage.engines.may_finish.set()
    await stage.wait_until_served(version(2))
    assert stage.updater.versions_in_use == [version(2)]


async def test_failed_update_is_retried(stage):
    stage.engines.failures = [ProviderError("no inference server is up")] * 2
    stage.publish(version(1))
    await stage.wait_until_served(version(1))
    assert stage.engines.updates == [1, 1, 1]


@pytest.mark.parametrize("when", ["while the update fails", "after it has failed", "while no engine is up"])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_newer_version_does_not_wait_for_the_retry_of_an_older_one(when, is_replaced):
    async with open_stage(retry_delay=1000) as stage:
        engines = stage.engines
        engines.failures = [ProviderError("the engine was restarted")]
        engines.may_finish.clear()
        stage.publish(version(1))
        await stage.wait_until_called()
        if when == "after it has failed":
            engines.may_finish.set()
            while engines.failures or stage.updater.versions_in_use != [version(1)]:
                await asyncio.sleep(0)
        elif when == "while no engine is up":
            engines.failures, engines.versions = [], {}
        if is_replaced:
            stage.updater.discard_pending()
        newer = version(2, incarnation=int(is_replaced))
        stage.publish(newer)
        engines.may_finish.set()
        await stage.wait_until_served(newer)
        assert engines.updates == [1, 2]


async def test_permanent_failure_is_ignored_if_the_version_is_superseded(stage):
    stage.engines.failures = [WeightsRefused("it is gone")]
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    await stage.wait_until_called()
    stage.publish(version(2))
    stage.engines.may_finish.set()
    await stage.wait_until_served(version(2))
    assert stage.applied == [version(2)]


async def test_permanent_failure_ends_the_run():
    stage = Stage()
    stage.engines.failures = [WeightsRefused("it is gone")]
    stage.publish(version(1))
    with pytest.raises(WeightsRefused):
        async with asyncio.timeout(10):
            await stage.updater.run()


async def test_hold_waits_for_an_update_that_is_being_applied(stage):
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    await stage.wait_until_called()

    async def evaluate() -> PolicyVersion | None:
        async with stage.updater.hold():
            stage.publish(version(2))
            await asyncio.sleep(0)
            return stage.updater.served_version

    eval_task = asyncio.create_task(evaluate())
    await asyncio.sleep(0)
    stage.engines.may_finish.set()
    assert await eval_task == version(1)
    await stage.wait_until_served(version(2))


async def test_pending_update_of_a_replaced_trainer_is_discarded(stage):
    async with stage.updater.hold():
        stage.publish(version(7))
        await asyncio.sleep(0)
        stage.updater.discard_pending()
    stage.publish(version(4, incarnation=1))
    await stage.wait_until_served(version(4, incarnation=1))
    assert stage.engines.updates == [4]


@pytest.mark.parametrize("late", [False, True])
async def test_update_timeout_restarts_with_a_new_trainer(stage, late):

    stage.engines.failures = [ProviderError("no inference server is up")]
    stage.engines.may_finish.clear()
    stage.publish(version(7))
    await stage.wait_until_called()
    if late:
        stage.updater.discard_pending()
    stage.engines.may_finish.set()
    while stage.engines.failures:
        await asyncio.sleep(0)
    stage.updater.discard_pending()
    stage.clock.advance(UpdateSettings().timeout + 1)
    stage.engines.failures = [ProviderError("still none")]
    stage.publish(version(4, incarnation=1))
    await stage.wait_until_served(version(4, incarnation=1))


async def test_initial_version_is_not_applied_again(stage):
    stage.engines.versions = {"http://engine": version(0)}
    stage.publish(version(0))
    assert (stage.updater.served_version, stage.applied, stage.engines.updates) == (version(0), [version(0)], [])
    stage.publish(version(0, incarnation=1))  # from a restarted trainer
    await stage.wait_until_served(version(0, incarnation=1))


# -- copies from the trainer's memory ---------------------------------------------------------------------------------


async def is_waiting(copied: asyncio.Task) -> bool:
    done, _ = await asyncio.wait([copied], timeout=0.05)
    return not done


async def test_the_trainer_waits_until_the_engines_have_copied_its_weights(stage):
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    copied = asyncio.create_task(stage.updater.wait_until_copied(version(1)))
    assert await is_waiting(copied)
    stage.engines.may_finish.set()
    async with asyncio.timeout(10):
        assert await copied == ""
        assert await stage.updater.wait_until_copied(version(0)) == ""  # an older version, which nobody copies


async def test_the_trainer_does_not_wait_for_a_slow_engine_longer_than_the_timeout(stage):
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    copied = asyncio.create_task(stage.updater.wait_until_copied(version(1)))
    assert await is_waiting(copied)
    stage.clock.now += 21
    async with asyncio.timeout(10):
        assert "http://engine did not copy p@0.1 within 20 s" in await copied


@pytest.mark.parametrize("state", ["held", "dead", "failing"])
async def test_the_trainer_does_not_wait_for_engines_that_will_not_copy(stage, state):
    async with contextlib.AsyncExitStack() as stack:
        if state == "held":  # the engines skip the version
            await stack.enter_async_context(stage.updater.hold())
            stage.publish(version(1))
        elif state == "dead":
            stage.engines.may_finish.clear()
            stage.publish(version(1))
            await stage.wait_until_called()
            stage.engines.versions = {}
        else:
            async with open_stage(retry_delay=60.0) as stage:
                stage.engines.failures = [ProviderError("no")]
                stage.publish(version(1))
                await stage.wait_until_called()
                async with asyncio.timeout(10):
                    assert await stage.updater.wait_until_copied(version(1)) == ""
                return
        async with asyncio.timeout(10):
            assert await stage.updater.wait_until_copied(version(1)) == ""


async def test_an_eval_that_begins_during_a_copy_does_not_end_the_wait(stage):
    stage.engines.may_finish.clear()
    stage.publish(version(1))
    await stage.wait_until_called()

    async def evaluate() -> None:
        async with stage.updater.hold():
            pass

    holding = asyncio.create_task(evaluate())
    copied = asyncio.create_task(stage.updater.wait_until_copied(version(1)))
    assert await is_waiting(copied)
    stage.engines.may_finish.set()
    async with asyncio.timeout(10):
        assert await copied == ""
        await holding
