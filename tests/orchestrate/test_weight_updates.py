"""Versions reach the engines one at a time, the newest first, and none is removed while an engine may read it."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from ramify.client.engine_adapter import WeightUpdateAck
from ramify.errors import ProviderError, WeightsRefused
from ramify.model.version import PolicyVersion
from ramify.orchestrate import weight_updates as module
from ramify.orchestrate.weight_updates import WeightUpdater


class Engines:
    """What `Weights` needs of a client: it takes versions when it is let."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.versions: dict[str, PolicyVersion] = {}
        self.failures: list[Exception] = []
        self.let = asyncio.Event()
        self.called = asyncio.Event()
        self.let.set()

    async def update_weights(self, path: Path, version: PolicyVersion) -> list[WeightUpdateAck]:
        self.asked.append(version.step)
        self.called.set()
        await self.let.wait()
        if self.failures:
            raise self.failures.pop(0)
        return [WeightUpdateAck("http://engine", version, 0.1)]


def version(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion("p", incarnation, step)


class Stage:
    def __init__(self) -> None:
        self.engines, self.applied, self.told = Engines(), list[PolicyVersion](), asyncio.Event()
        self.weights = WeightUpdater(self.engines, self._applied)  # type: ignore[arg-type]

    def _applied(self, found: PolicyVersion, seconds: float) -> None:
        self.applied.append(found)
        self.told.set()

    def offer(self, *found: PolicyVersion) -> None:
        for each in found:
            self.weights.request_update(each, Path(str(each.step)))

    async def until_serving(self, wanted: PolicyVersion) -> None:
        async with asyncio.timeout(10):
            while self.weights.served_version != wanted:
                await self.told.wait()
                self.told.clear()

    async def until_called(self) -> None:
        async with asyncio.timeout(10):
            await self.engines.called.wait()
        self.engines.called.clear()


def played(monkeypatch, story) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.01)

    async def main() -> None:
        stage = Stage()
        running = asyncio.create_task(stage.weights.run())
        try:
            await story(stage)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    asyncio.run(main())


def test_one_that_is_overtaken_is_never_applied(monkeypatch):
    async def story(stage: Stage) -> None:
        stage.offer(version(1), version(2))
        await stage.until_serving(version(2))
        assert stage.applied == [version(2)]

    played(monkeypatch, story)


def test_a_version_that_is_being_applied_is_needed_though_a_newer_one_waits(monkeypatch):
    async def story(stage: Stage) -> None:
        stage.engines.let.clear()
        stage.offer(version(1))
        await stage.until_called()
        stage.offer(version(2))
        assert stage.weights.versions_in_use == [version(1), version(2)]
        stage.engines.let.set()
        await stage.until_serving(version(2))
        assert stage.weights.versions_in_use == [version(2)]

    played(monkeypatch, story)


def test_engines_that_are_away_are_asked_again(monkeypatch):
    async def story(stage: Stage) -> None:
        stage.engines.failures = [ProviderError("no inference server is up")] * 2
        stage.offer(version(1))
        await stage.until_serving(version(1))
        assert stage.engines.asked == [1, 1, 1]

    played(monkeypatch, story)


def test_a_refusal_ends_the_run_unless_the_version_was_overtaken(monkeypatch):
    async def overtaken(stage: Stage) -> None:
        stage.engines.failures = [WeightsRefused("it is gone")]
        stage.engines.let.clear()
        stage.offer(version(1))
        await stage.until_called()
        stage.offer(version(2))
        stage.engines.let.set()
        await stage.until_serving(version(2))
        assert stage.applied == [version(2)]

    async def alone() -> None:
        stage = Stage()
        stage.engines.failures = [WeightsRefused("it is gone")]
        stage.offer(version(1))
        async with asyncio.timeout(10):
            await stage.weights.run()

    played(monkeypatch, overtaken)
    with pytest.raises(WeightsRefused):
        asyncio.run(alone())


def test_an_eval_holds_the_weights_after_what_was_begun(monkeypatch):
    async def story(stage: Stage) -> None:
        stage.engines.let.clear()
        stage.offer(version(1))
        await stage.until_called()

        async def evaluate() -> PolicyVersion | None:
            async with stage.weights.hold():
                stage.offer(version(2))
                await asyncio.sleep(0)
                return stage.weights.served_version

        evaluating = asyncio.create_task(evaluate())
        await asyncio.sleep(0)
        stage.engines.let.set()
        assert await evaluating == version(1)
        await stage.until_serving(version(2))

    played(monkeypatch, story)


def test_what_a_replaced_trainer_offered_is_forgotten(monkeypatch):
    async def story(stage: Stage) -> None:
        async with stage.weights.hold():
            stage.offer(version(7))
            await asyncio.sleep(0)
            stage.weights.discard_pending()
        stage.offer(version(4, incarnation=1))
        await stage.until_serving(version(4, incarnation=1))
        assert stage.engines.asked == [4]

    played(monkeypatch, story)


@pytest.mark.parametrize("late", [False, True])
def test_engines_that_failed_a_replaced_trainer_have_all_their_time_for_the_next(monkeypatch, late):
    clock = SimpleNamespace(now=1.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)

    async def story(stage: Stage) -> None:
        stage.engines.failures = [ProviderError("no inference server is up")]
        stage.engines.let.clear()
        stage.offer(version(7))
        await stage.until_called()
        if late:
            stage.weights.discard_pending()
        stage.engines.let.set()
        while stage.engines.failures:
            await asyncio.sleep(0)
        stage.weights.discard_pending()
        clock.now = module.UPDATE_TIMEOUT + 2
        stage.engines.failures = [ProviderError("still none")]
        stage.offer(version(4, incarnation=1))
        await stage.until_serving(version(4, incarnation=1))

    played(monkeypatch, story)


def test_what_the_engines_began_with_is_not_given_to_them_again(monkeypatch):
    async def story(stage: Stage) -> None:
        stage.engines.versions = {"http://engine": version(0)}
        stage.offer(version(0))
        assert (stage.weights.served_version, stage.applied, stage.engines.asked) == (version(0), [version(0)], [])
        stage.offer(version(0, incarnation=1))  # of a trainer that began again
        await stage.until_serving(version(0, incarnation=1))

    played(monkeypatch, story)
