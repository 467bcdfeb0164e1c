"""When evals are run: at the first version, at the last, and once an interval, however long one takes."""

import asyncio
from types import SimpleNamespace

from ramify.orchestrate import watching
from ramify.orchestrate.evaluating import Evaluating
from ramify.store.journal import Metric


class Slow(Evaluating):
    """Evals of one source every ten steps that end when they are let."""

    def __init__(self) -> None:
        self._sources = {"it": (SimpleNamespace(interval=10), None)}  # type: ignore[assignment]
        self._last: dict[str, int] = {}
        self.ran: list[int] = []
        self.let = asyncio.Event()

    async def _one(self, name: str, step: int) -> None:
        self.ran.append(step)
        await self.let.wait()


def test_an_eval_that_outlasts_its_interval_is_followed_by_one_and_not_by_one_for_every_version():
    async def main():
        evaluating, due = Slow(), asyncio.Queue()
        run = SimpleNamespace(evaluating=evaluating, due=due, sampling=SimpleNamespace(open=asyncio.Event()))

        def applied(step: int) -> None:
            if names := evaluating.due(step):
                due.put_nowait((step, names))

        following = asyncio.create_task(watching.evaluate(run))  # type: ignore[arg-type]
        applied(0)
        while not evaluating.ran:
            await asyncio.sleep(0)
        for step in range(1, 36):
            applied(step)
        evaluating.let.set()
        async with asyncio.timeout(10):
            await due.join()
        following.cancel()
        return evaluating.ran

    assert asyncio.run(main()) == [0, 35]


def test_what_an_earlier_process_measured_is_not_measured_again():
    evaluating = Slow()
    evaluating._sources["envs/mine.py"] = evaluating._sources["it"]
    known = [Metric(10, "eval/it/avg", 0.5), Metric(10, "eval/envs/mine.py/avg", 0.5)]
    evaluating.restore(known)
    assert evaluating.due(12) == []
    assert evaluating.due(20) == ["it", "envs/mine.py"]
