"""Evals during a run: when they are due, and what they record."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.online_evals import EvalSchedule, OnlineEvaluator
from ramify.rollout.envserver.messages import GroupScores
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.run.store import RunStore
from ramify.run.store.run_log import MetricPoint
from tests.support.traces import make_trace


def make_schedule(*names: str) -> EvalSchedule:
    return EvalSchedule(EvalSourceConfig(name=name, taskset={"id": "reverse-text"}, interval=10) for name in names)


class SlowEvaluator(OnlineEvaluator):
    """Evaluates one source every ten steps; evals end when `may_finish` is set."""

    def __init__(self) -> None:
        self.schedule = make_schedule("it")
        self._queue = asyncio.Queue()
        self.steps: list[int] = []
        self.may_finish = asyncio.Event()

    async def _evaluate_source(self, name: str, step: int) -> None:
        self.steps.append(step)
        await self.may_finish.wait()


async def test_evals_that_become_due_during_an_eval_are_merged():
    evaluator = SlowEvaluator()
    eval_task = asyncio.create_task(evaluator.run_queued())
    evaluator.queue_due_sources(0)
    while not evaluator.steps:
        await asyncio.sleep(0)
    for step in range(1, 36):
        evaluator.queue_due_sources(step)
    evaluator.may_finish.set()
    async with asyncio.timeout(10):
        await evaluator.wait_for_queued()
    eval_task.cancel()
    assert evaluator.steps == [0, 35]


def test_evals_of_an_earlier_process_are_not_repeated():
    schedule = make_schedule("it", "envs/mine.py")
    metrics = [MetricPoint(10, "eval/it/avg", 0.5), MetricPoint(10, "eval/envs/mine.py/avg", 0.5)]
    schedule.restore(metrics)
    assert schedule.get_due_sources(12) == []
    assert schedule.get_due_sources(20) == ["it", "envs/mine.py"]


class FakeEnvServer:
    """An env server with a group reward: the number of attempts that were compared. Task 1 fails."""

    async def get_task(self, number: int) -> dict[str, Any]:
        return {"number": number, "timeout": 60.0 if number else None}

    async def run(self, task, *, id, timeout, **_):
        assert timeout == 9.0 + (task["timeout"] or 0.0)
        failure = "ProcessDied" if task["number"] == 1 else None
        trace = make_trace(id, None if failure else 1.0, failure=failure)
        trace.episode, trace.rewards["together"] = id, None
        return SimpleNamespace(episode=SimpleNamespace(traces=[trace]))

    async def score_group(self, task, traces, **_) -> GroupScores:
        rewards = [{"together": (float(len(traces)), 1.0)} for _ in traces]
        return GroupScores(rewards, [[] for _ in traces], [{} for _ in traces], [{} for _ in traces])


async def test_eval_adds_group_rewards_and_reports_system_failures(tmp_path):
    failures: list[tuple[str, str]] = []
    values: dict[str, float] = {}
    server: Any = FakeEnvServer()
    source = ConnectedSource(
        name="it",
        servers=server,
        tasks=server,
        attempt_timeout=9.0,
        max_tries=1,
        server_timeout=9.0,
        group_rewards=frozenset(["together"]),
    )
    config = EvalSourceConfig(name="it", taskset={"id": "reverse-text"}, num_tasks=3, repetitions=2)
    with RunStore.open(tmp_path) as store:
        evaluator = OnlineEvaluator(
            {"it": (config, source)},
            None,
            store,
            seed=0,
            on_result=lambda _, metrics: values.update(metrics),
            on_failure=lambda origin, failure: failures.append((origin, failure.name)),
            on_progress=lambda: None,
        )
        await evaluator.run(4, ["it"])
        rows = {row.id: (row.reward, row.failure) for row in store.rollouts(source="eval/it")}
    assert (values["eval/it/avg"], values["eval/it/missing"]) == (3.0, 1.0)
    assert failures == [("eval/it", "ProcessDied")] * 2
    assert rows == {
        f"eval.it.4.{task}.{repetition}": (None, "ProcessDied") if task == 1 else (3.0, None)
        for task in range(3)
        for repetition in range(2)
    }
