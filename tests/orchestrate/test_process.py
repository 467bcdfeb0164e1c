"""The end of a run, and those who come before it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ramify.orchestrate.process import LEFT, Orchestrator
from ramify.store.entries import Marks


def test_a_run_that_is_asked_to_leave_does_not_wait_for_its_last_evals():
    noted: list[str] = []

    async def story() -> int:
        began, ended = asyncio.Event(), asyncio.Event()

        async def evaluate(*_: object) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def announce() -> None: ...

        orchestrator: Any = object.__new__(Orchestrator)
        orchestrator._run = SimpleNamespace(
            leaving=asyncio.Event(),
            due=asyncio.Queue(),
            core=SimpleNamespace(marks=Marks(committed=3, acknowledged=3)),
            service=SimpleNamespace(over=True, met=True, committed=asyncio.Event(), announce=announce),
            weights=SimpleNamespace(serving=SimpleNamespace(step=3), waiting_since=None),
            evaluating=SimpleNamespace(due=lambda step, last: ["it"], run=evaluate),
            journal=SimpleNamespace(note=lambda kind, **_: noted.append(kind)),
        )
        async with asyncio.timeout(10):
            running = asyncio.create_task(orchestrator._until_over())
            await began.wait()
            orchestrator.leave()
            code = await running
            await ended.wait()
        return code

    assert asyncio.run(story()) == LEFT
    assert noted == ["left"]
