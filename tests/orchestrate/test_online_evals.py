"""When evals are run: at the first version, at the last, and once an interval, however long one takes."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ramify.envserver.messages import GroupScores
from ramify.orchestrate import background
from ramify.orchestrate.attempt_dispatcher import ConnectedSource
from ramify.orchestrate.online_evals import OnlineEvaluator
from ramify.store import RunStore
from ramify.store.run_log import MetricPoint
from tests.orchestrate.rollouts import rollout


class Slow(OnlineEvaluator):
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
            if names := evaluating.get_due_sources(step):
                due.put_nowait((step, names))

        following = asyncio.create_task(background.run_due_evals(run))  # type: ignore[arg-type]
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
    known = [MetricPoint(10, "eval/it/avg", 0.5), MetricPoint(10, "eval/envs/mine.py/avg", 0.5)]
    evaluating.restore(known)
    assert evaluating.get_due_sources(12) == []
    assert evaluating.get_due_sources(20) == ["it", "envs/mine.py"]


class Env:
    """An env server: the replies of each task are compared, and all are worth how many there are."""

    async def get(self, number: int) -> dict[str, Any]:
        return {"number": number, "timeout": 60.0 if number else None}

    async def run(self, task, *, id, deadline, **_):
        assert deadline == 9.0 + (task["timeout"] or 0.0)
        failure = "WorkerDied" if task["number"] == 1 else None
        trace = rollout(id, None if failure else 1.0, failure=failure)
        trace.episode, trace.rewards["together"] = id, None
        return SimpleNamespace(episode=SimpleNamespace(traces=[trace]))

    async def score_group(self, task, traces, **_) -> GroupScores:
        return GroupScores([{"together": (float(len(traces)), 1.0)} for _ in traces], [[] for _ in traces])


def test_rollouts_are_compared_where_the_taskset_does_that_and_what_the_system_failed_is_told(tmp_path):
    told: list[tuple[str, str]] = []
    values: dict[str, float] = {}
    env: Any = Env()
    served = ConnectedSource(
        "it", env, env, has_group_rewards=True, attempt_timeout=9.0, max_tries=1, server_timeout=9.0
    )
    config: Any = SimpleNamespace(endpoint=None, hold_weights=False, num_tasks=3, repetitions=2, threshold=1.0)
    weights: Any = None
    with RunStore.open(tmp_path) as store:
        evaluating = OnlineEvaluator(
            {"it": (config, served)},
            weights,
            store,
            seed=0,
            on_result=lambda _, found: values.update(found),
            on_failure=lambda where, failure: told.append((where, failure.name)),
            on_progress=lambda: None,
        )
        asyncio.run(evaluating.run(4, ["it"]))
        rows = {row.id: (row.reward, row.failure) for row in store.rollouts(source="eval/it")}
    assert (values["eval/it/avg"], values["eval/it/missing"]) == (3.0, 1.0)
    assert told == [("eval/it", "WorkerDied")] * 2
    assert rows == {
        f"eval.it.4.{task}.{repetition}": (None, "WorkerDied") if task == 1 else (3.0, None)
        for task in range(3)
        for repetition in range(2)
    }
