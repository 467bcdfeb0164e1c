"""An eval runs every (task, repetition) pair once, whatever happens."""

import asyncio
from types import SimpleNamespace

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.rollout.evals import EvalConfig
from ramify.rollout.evals.run import fail_when_engine_exits
from ramify.run.store import RunStore
from tests.rollout.evals import environments
from tests.support.engine import ScriptedEngine, fail, first, reverse_some, run_engine

pytestmark = pytest.mark.process

FILE = environments.__file__


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


@pytest.fixture
def configured(engine, tmp_path):
    """Return a function that configures an eval against the scripted engine."""

    def make(cls: str = "Echo", taskset: dict | None = None, **more) -> EvalConfig:
        engine.reset(reverse_some)
        base = {
            "taskset": {"id": f"{FILE}:{cls}", **(taskset or {})},
            "inference": {"engine": "external", "base_url": [engine.url]},
            "output": tmp_path,
            "name": "run",
            "num_tasks": 4,
            "repetitions": 2,
            "concurrency": 3,
            "max_tries": 1,
            "model_retries": 0,
        }
        return EvalConfig.model_validate({**base, **more})

    return make


def right(number: int) -> float:
    text = f"word {number}"
    return float(reverse_some(text) == f"<reversed_text>{text[::-1]}</reversed_text>")


def pairs(result) -> list[tuple[str, int]]:
    return [(row.task, row.repetition) for row in result.rows]


def test_every_task_is_repeated_and_scored(configured, engine):
    result = rf.evaluate(configured())
    assert pairs(result) == [(f"task-{number}", repetition) for number in range(4) for repetition in range(2)]
    assert [row.reward for row in result.rows] == [right(number) for number in range(4) for _ in range(2)]
    assert len({row.reward for row in result.rows}) == 2
    assert result.num_run == len(engine.requests) == 8
    assert not result.all_failed
    with RunStore.open(result.path, write=False) as store:
        (trace,) = store.read_traces("task-2.1")
        assert trace.task["key"] == "task-2"
        assert trace.metrics["length"] > 10
        assert len(trace.branches) == 1
        assert len(trace.sampled_nodes) == 1


def test_rerun_of_a_finished_eval_sends_no_requests(configured, engine):
    first = rf.evaluate(configured())
    second = rf.evaluate(configured())
    assert (second.num_run, engine.requests) == (0, [])
    assert second.rows == first.rows


def test_more_repetitions_or_tasks_run_only_the_new_rollouts(configured, engine):
    rf.evaluate(configured())
    result = rf.evaluate(configured(repetitions=3))
    assert result.num_run == len(engine.requests) == 4
    result = rf.evaluate(configured(repetitions=3, num_tasks=6, concurrency=1))
    assert result.num_run == len(engine.requests) == 6
    assert len(result.rows) == 18


def test_fewer_tasks_report_only_their_rows(configured):
    rf.evaluate(configured())
    assert len(rf.evaluate(configured(num_tasks=1)).rows) == 2


def test_every_rollout_has_its_own_stable_seed(configured, engine):
    rf.evaluate(configured(num_tasks=2))
    seeds = {body["sampling_params"]["seed"] for body in engine.requests}
    assert len(seeds) == 4
    rf.evaluate(configured(num_tasks=2), fresh=True)
    assert {body["sampling_params"]["seed"] for body in engine.requests} == seeds
    config = configured(num_tasks=2, sampling={"seed": 7}, name="other")
    rf.evaluate(config)
    assert not seeds & {body["sampling_params"]["seed"] for body in engine.requests}


def test_only_rollouts_with_system_failures_are_rerun(configured, engine):
    config = configured(concurrency=1)
    engine.behaviour = first(fail, times=3)
    result = rf.evaluate(config)
    assert [row.failure for row in result.rows] == ["ProviderError"] * 3 + [None] * 5
    assert not result.all_failed
    second = rf.evaluate(configured())
    assert second.num_run == len(engine.requests) == 3
    assert [row.failure for row in second.rows] == [None] * 8


def test_all_failed(configured, engine):
    config = configured(num_tasks=1)
    engine.behaviour = fail
    assert rf.evaluate(config).all_failed


@pytest.mark.parametrize(("fault", "message"), [("text", "str"), ("raise", "the judge fell asleep")])
def test_failing_reward_fails_only_its_rollout(configured, fault, message):
    result = rf.evaluate(configured(taskset={"fault": fault}))
    broken = [row for row in result.rows if row.task == "task-1"]
    assert all(row.failure and message in row.summary["message"] for row in broken)
    assert all("right" in row.summary["message"] for row in broken)
    assert [row.failure for row in result.rows if row.task != "task-1"] == [None] * 6


def test_group_rewards_include_repetitions_of_an_earlier_start(configured):
    result = rf.evaluate(configured("Compared"))
    assert [row.reward for row in result.rows if row.task == "task-0"] == [right(0), right(0) + 0.5]
    result = rf.evaluate(configured("Compared", repetitions=3))
    assert [row.reward for row in result.rows if row.task == "task-0"] == [right(0) + 0.5 * rank for rank in range(3)]


def test_server_without_token_ids_is_used_as_a_chat_endpoint(tmp_path, configured):
    with run_engine(ScriptedEngine(reverse_some, owner="somebody")) as chat:
        config = configured(inference={"engine": "external", "base_url": [chat.url]}, model={"name": "gpt-x"})
        result = rf.evaluate(config)
        assert {body["model"] for body in chat.requests} == {"gpt-x"}
    assert [row.reward for row in result.rows] == [right(number) for number in range(4) for _ in range(2)]
    assert {(row.summary["input"], row.summary["output"]) for row in result.rows} == {(10, 3)}


def test_other_identity_is_refused_and_fresh_renames_the_old_run(configured, tmp_path):
    rf.evaluate(configured())
    hot = configured(sampling={"temperature": 0.5})
    with pytest.raises(ConfigInvalid, match=r"sampling\.temperature: was 1\.0, now 0\.5"):
        rf.evaluate(hot)
    assert rf.evaluate(hot, fresh=True).num_run == 8
    assert (tmp_path / "run.old-1" / "run.sqlite").exists()


def test_default_run_name_depends_on_the_identity(configured):
    one = rf.evaluate(configured(name="", num_tasks=1))
    two = rf.evaluate(configured(name="", num_tasks=1, sampling={"temperature": 0.5}))
    assert one.path.parent == two.path.parent
    assert one.path != two.path
    assert one.path.name.startswith("Echo-tiny-")


def test_duplicate_task_gets_its_own_key(configured, tmp_path):
    path = tmp_path / "twins.py"
    path.write_text(
        "import ramify as rf\n"
        "class Twins(rf.Taskset):\n"
        "    def load(self):\n"
        "        return [rf.Task(prompt='a b', key='one')] * 2\n"
        "    @rf.reward\n"
        "    def any(self, trace):\n"
        "        return 1.0\n"
    )
    result = rf.evaluate(configured(taskset={"id": str(path)}))
    assert pairs(result) == [("one", 0), ("one", 1), ("one#2", 0), ("one#2", 1)]


class StoppableEngine:
    """A model server that runs until it is told to exit."""

    def __init__(self) -> None:
        self.exit = asyncio.Event()
        self.log = SimpleNamespace(describe_tail=lambda: "its log is empty")

    async def wait(self) -> int:
        await self.exit.wait()
        return 1


async def test_exit_of_the_started_engine_ends_the_eval():
    engine = StoppableEngine()
    async with asyncio.timeout(10):
        with pytest.raises(ProviderError, match="the model server exited; its log is empty"):
            async with fail_when_engine_exits(engine):
                engine.exit.set()
                await asyncio.Event().wait()
        with pytest.raises(ConfigInvalid, match="no model"):
            async with fail_when_engine_exits(StoppableEngine()):
                raise ConfigInvalid("no model")
        async with fail_when_engine_exits(StoppableEngine()):
            pass
    current_task = asyncio.current_task()
    assert current_task is not None and not current_task.cancelling()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "engine"] == []


async def test_cancelled_eval_with_an_engine_stays_cancelled():
    async def evaluate() -> None:
        async with fail_when_engine_exits(StoppableEngine()):
            await asyncio.Event().wait()

    task = asyncio.create_task(evaluate())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
