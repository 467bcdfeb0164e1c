"""Judges in evals: no reply is paid for twice, and a killed eval loses no score."""

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify as rf
from ramify.core.config import write_toml
from ramify.rollout.evals import EvalConfig
from ramify.rollout.evals.replay import load_environment, rescore
from ramify.run.store import RunStore
from tests.rollout.evals import environments
from tests.support.engine import Exchange, ScriptedEngine, hang, run_engine
from tests.support.runs import FULL, command

pytestmark = pytest.mark.process

CONCURRENCY = 2  # calls of each judge in flight
NUM_TASKS, REPETITIONS = 6, 4


class SeededEngine(ScriptedEngine):
    """Replies with one to seven letters; the seed of a request decides, so that a repeated rollout is the same."""

    def sample(self, body):
        length = 1 + body["sampling_params"]["seed"] % 7
        self.script = lambda _: "a" * length
        return super().sample(body)


def decide(prompt: str) -> str:
    """Judge by a known rule: replies of even length are correct, and longer ones are better."""
    if replies := re.findall(r'<reply-\w+ number="\d+">\n(.*?)\n</reply-', prompt):
        return json.dumps({"ranks": [1 + sum(len(other) > len(reply) for other in replies) for reply in replies]})
    reply = prompt.partition("# Answer to check\n")[2].partition("\n")[0]
    return json.dumps({"correct": len(reply) % 2 == 0})


class JudgeServer(ScriptedEngine):
    """Answers the first `limit` requests, and holds the others until their client dies."""

    def __init__(self) -> None:
        super().__init__(decide, owner=None)
        self.limit, self.num_answers, self.num_held = 1 << 20, 0, 0

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]

    async def _complete_chat(self, exchange: Exchange) -> None:
        if self.num_answers < self.limit:
            self.num_answers += 1
            await super()._complete_chat(exchange)
            return
        self.requests.append(exchange.body)
        self.num_held += 1
        await hang(self, exchange)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with run_engine(SeededEngine("seeded")) as engine:
        yield engine


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    server = JudgeServer()
    with run_engine(server):
        yield server


@pytest.fixture
def config(engine, judge, tmp_path) -> EvalConfig:
    taskset = {"judge_url": f"{judge.url}/v1", "judge_concurrency": CONCURRENCY, "size": NUM_TASKS}
    table = {
        "taskset": {"id": f"{environments.__file__}:Judged", **taskset},
        "inference": {"engine": "external", "base_url": [engine.url]},
        "output": tmp_path,
        "name": "run",
        "num_tasks": NUM_TASKS,
        "repetitions": REPETITIONS,
        "concurrency": 4,
    }
    return EvalConfig.model_validate(table)


def read_scores(result) -> dict[str, tuple[float, ...]]:
    return {row.id: tuple(row.summary["rewards"].values()) for row in result.rows}


def test_a_repeated_eval_and_a_replay_make_no_calls(config, judge):
    first = rf.evaluate(config)
    assert all(None not in scores for scores in read_scores(first).values())
    assert len(judge.prompts) == len(set(judge.prompts)) > NUM_TASKS
    num_calls = sum(row.summary["metrics"]["judge/calls"] for row in first.rows)
    assert num_calls == pytest.approx(len(judge.prompts))
    judge.reset(decide)

    again = rf.evaluate(config, fresh=True)
    assert again.num_run == NUM_TASKS * REPETITIONS
    assert read_scores(again) == read_scores(first)
    assert sum(row.summary["metrics"]["judge/calls"] for row in again.rows) == 0

    async def replay():
        with RunStore.open(again.path, write=False) as store:
            return [rollout async for rollout in rescore(store, load_environment(store))]

    rollouts = asyncio.run(replay())
    assert [rollout.new_reward for rollout in rollouts] == [rollout.old_reward for rollout in rollouts]
    assert judge.prompts == []


def test_workers_use_the_cache_of_the_run(config, judge):
    first = rf.evaluate(config)
    judge.reset(decide)
    again = rf.evaluate(config, fresh=True, workers=1)
    assert (read_scores(again), judge.prompts) == (read_scores(first), [])


def test_a_group_whose_judge_failed_is_judged_again(config, judge):
    refusals = iter(range(2))
    judge.set_script(lambda prompt: "?" if "<reply" in prompt and next(refusals, None) is not None else decide(prompt))
    result = rf.evaluate(config)
    assert [row.failure for row in result.rows] == [None] * (NUM_TASKS * REPETITIONS)
    assert all(None not in scores for scores in read_scores(result).values())


@pytest.mark.promise
def test_an_eval_that_is_killed_while_scoring_loses_no_score(config, judge, tmp_path):
    write_toml(config, tmp_path / "eval.toml")
    for limit in range(1, 19, 2) if FULL else (3, 12):
        judge.limit = limit
        with (tmp_path / "output.txt").open("w") as output:
            arguments = command("eval", "@", str(tmp_path / "eval.toml"))
            process = subprocess.Popen(arguments, cwd=tmp_path, stdout=output, stderr=output)
            try:
                wait_until_held(judge, process, tmp_path)
            finally:
                process.kill()
                process.wait()
            while judge.connections:  # it still reads what was sent to it
                time.sleep(0.01)
    num_held, judge.limit = judge.num_held, 1 << 20
    result = rf.evaluate(config)
    prompts = judge.prompts
    assert num_held >= 2
    assert len(prompts) - len(set(prompts)) <= num_held

    uninterrupted = rf.evaluate(config, name="uninterrupted", output=tmp_path / "elsewhere")
    assert len(result.rows) == NUM_TASKS * REPETITIONS
    assert read_scores(result) == read_scores(uninterrupted)
    assert set(judge.prompts[len(prompts) :]) == set(prompts)


def wait_until_held(judge: JudgeServer, process: subprocess.Popen[bytes], home: Path) -> None:
    """Wait until the judge holds a further request, and all replies that it gave are in the cache."""
    num_held, deadline = judge.num_held, time.monotonic() + 60
    while judge.num_held == num_held or len(list(home.glob("judge-cache/*/*.json"))) < judge.num_answers:
        assert process.poll() is None, (home / "output.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
