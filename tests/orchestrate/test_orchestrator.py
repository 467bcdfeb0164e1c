"""The end of a run: final evals and stop requests."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from ramify.core.errors import RunStalled
from ramify.orchestrate import orchestrator as module
from ramify.orchestrate.orchestrator import Orchestrator, run_unless_stopped
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.trace.version import PolicyVersion


async def run(stop: bool, work) -> bool:
    """Run `work`; if `stop`, with a stop request shortly after its start."""
    stop_requested = asyncio.Event()
    if stop:
        asyncio.get_running_loop().call_later(0.01, stop_requested.set)
    async with asyncio.timeout(10):
        return await run_unless_stopped(stop_requested, work)


async def test_stop_cancels_the_final_evals():
    cancelled: list[bool] = []

    async def evals() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cancelled.append(True)

    assert not await run(True, evals())
    assert cancelled == [True]


async def test_failure_of_the_final_evals_is_raised():
    async def fails() -> None:
        raise RunStalled("it")

    assert await run(False, asyncio.sleep(0.01))
    with pytest.raises(RunStalled):
        await run(False, fails())


class FakeEvaluator:
    """Records the version that the engines serve when an eval starts."""

    def __init__(self, weight_updater: WeightUpdater) -> None:
        self._weight_updater = weight_updater
        self.evaluated: list[PolicyVersion | None] = []

    def get_due_sources(self, step: int, *, is_last: bool) -> list[str]:
        return ["it"]

    async def wait_for_queued(self) -> None: ...

    async def run(self, step: int, names: list[str]) -> None:
        self.evaluated.append(self._weight_updater.served_version)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_final_eval_waits_for_the_last_version_of_a_replaced_trainer(monkeypatch, is_replaced):
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.001)
    weights_ready = asyncio.Event()

    async def update_weights(path: Path, version: PolicyVersion, *, run: str) -> dict[str, float]:
        return {"http://engine": 0.1}

    client = SimpleNamespace(versions={}, update_weights=update_weights)
    updater = WeightUpdater(client, lambda *_: weights_ready.set())  # type: ignore[arg-type]
    evaluator = FakeEvaluator(updater)
    orchestrator = Orchestrator.__new__(Orchestrator)
    orchestrator._run = SimpleNamespace(  # type: ignore[assignment]
        weight_updater=updater,
        evaluator=evaluator,
        dispatcher=SimpleNamespace(weights_ready=weights_ready),
        core=SimpleNamespace(ledger_progress=SimpleNamespace(committed=5)),
    )
    updater.served_version = PolicyVersion("p", 0, 4)
    weights_ready.set()
    last_version = PolicyVersion("p", 0, 5)
    updater.request_update(last_version, Path("5"))
    if is_replaced:  # as RunComponents does when a new trainer registers
        weights_ready.clear()
        updater.discard_pending()
        last_version = PolicyVersion("p", 1, 5)
    evals = asyncio.create_task(orchestrator._run_final_evals())
    await asyncio.sleep(0.01)
    assert not evals.done()
    if is_replaced:
        updater.request_update(last_version, Path("5"))
    updates = asyncio.create_task(updater.run())
    async with asyncio.timeout(10):
        await evals
    updates.cancel()
    assert evaluator.evaluated == [last_version]
