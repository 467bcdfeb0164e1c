"""The methods of an env server, and its log."""

import asyncio
import itertools
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.core.errors import ConfigInvalid, RequestInvalid
from ramify.env import Task
from ramify.processes.wire import WireMessage
from ramify.rollout.envserver import EnvServerConfig, env_worker
from ramify.rollout.envserver.env_worker import TaskPager
from tests.support.processes import async_wait_until as wait_until
from tests.support.tricky_env_server import make_config, task

pytestmark = pytest.mark.process


def test_rollout_is_scored_and_reports_progress(shared):
    runner, _, client = shared
    updates: list[tuple[str, int]] = []

    async def run_one():
        return await client.run(
            task(3),
            id="r3",
            group="g",
            attempt=2,
            seed=5,
            on_progress=lambda phase, calls: updates.append((phase, calls)),
        )

    done = runner.run(run_one())
    trace = done.episode.traces[0]
    assert (trace.id, trace.group, trace.attempt, trace.task) == ("r3", "g", 2, task(3))
    assert trace.rewards == {"right": (1.0, 1.0), "rank": None}
    assert updates == [("boot", 0), ("setup", 0), ("harness", 0), ("turn", 1), ("scoring", 1), ("done", 1)]
    assert done.crashes == 0


def test_environment_fault_is_recorded_in_the_episode(shared):
    runner, _, client = shared
    trace = runner.run(client.run(task(1, does="raise"), id="r")).episode.traces[0]
    assert [error.name for error in trace.errors] == ["EnvironmentFault"]
    assert trace.rewards["right"] is None


def test_tasks_are_returned_in_pages_with_their_identity(shared):
    runner, _, client = shared
    pages = [runner.run(client.tasks(start, 4)) for start in (0, 4, 8, 4, 12)]
    assert [[entry.identity for entry in page.tasks] for page in pages] == [
        [f"task-{number}" for number in range(start, min(start + 4, 10))] for start in (0, 4, 8, 4, 12)
    ]
    assert [page.end for page in pages] == [False, False, True, False, True]
    assert pages[0].tasks[2].task == task(2)


def test_info_counts_tasks(shared):
    runner, _, client = shared
    assert runner.run(client.info()).num_tasks == 10
    assert runner.run(client.info(count_tasks=False)).num_tasks is None


def test_infinite_tasks_are_counted_as_none(monkeypatch):
    monkeypatch.setattr(env_worker, "MAX_COUNTED_TASKS", 50)
    infinite: Any = SimpleNamespace(name="endless", iter_tasks=lambda: (Task() for _ in itertools.count()))
    exact: Any = SimpleNamespace(name="exact", iter_tasks=lambda: (Task() for _ in range(50)))
    assert (TaskPager(infinite).count(), TaskPager(exact).count()) == (None, 50)


def test_request_with_an_unknown_key_is_refused(shared):
    """A client of another version must not assume that its request was understood."""
    runner, _, client = shared
    request = {"start": 0, "count": 1, "shuffled": True}
    with pytest.raises(RequestInvalid, match="shuffled"):
        runner.run(client._client.call("tasks", WireMessage.encode(request), timeout=30.0))


def test_group_is_scored_together(shared):
    runner, _, client = shared

    async def group():
        results = await asyncio.gather(*(client.run(task(1), id=f"g{n}") for n in range(3)))
        return await client.score_group(task(1), [result.episode.traces[0] for result in results])

    scores = runner.run(group())
    assert [entry["rank"] for entry in scores.rewards] == [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5)]
    assert scores.errors == [[], [], []]
    assert [metrics["position"] for metrics in scores.metrics] == [0.0, 1.0, 2.0]
    assert [info["position"] for info in scores.info] == [0, 1, 2]


def test_info_describes_the_environment_and_sampling_can_be_overridden(shared):
    runner, server, client = shared
    info = runner.run(client.info())
    assert (info.name, info.model, info.trainable) == ("tricky", "tiny", True)
    assert (info.rewards, info.group_rewards) == ({"right": 1.0}, {"rank": 0.5})
    trace = runner.run(client.run(task(1), id="r", sampling={"temperature": 0.5})).episode.traces[0]
    assert trace.sampler["sampling"]["temperature"] == 0.5
    with pytest.raises(RequestInvalid, match="sampling"):
        runner.run(client.run(task(1), id="hot", sampling={"heat": 1}))

    async def wait_for_log():
        await wait_until(lambda: "rollout stopped id=hot" in server.log_path.read_text(), "the log")

    runner.run(wait_for_log())


def test_workers_never_import_torch(shared):
    _, server, _ = shared
    for worker in server.pool._ready_workers():
        assert "torch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_worker_output_is_logged_once_with_the_worker_id(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    def ready_ids() -> set[str]:
        return {worker.id for worker in server.pool._ready_workers()}

    first = ready_ids()

    async def run_rollouts():
        os.kill(server.pool._ready_workers()[0].pid, signal.SIGKILL)  # one of the two is started later
        await wait_until(
            lambda: len({worker.id for worker in server.pool._ready_workers()} - first) == 1, "the later worker"
        )
        rollouts = [
            asyncio.create_task(client.run(task(n, does="talk", gate=str(gate)), id=f"t{n}")) for n in range(200, 206)
        ]
        await wait_until(
            lambda: (tmp_path / "gate.begun").exists() and count_started() == 6, "six rollouts at the gate"
        )
        gate.touch()
        return await asyncio.gather(*rollouts)

    def count_started() -> int:
        return len((tmp_path / "gate.begun").read_text().splitlines())

    workers = {f"task-{200 + at}": done.worker_id for at, done in enumerate(runner.run(run_rollouts()))}
    assert len(set(workers.values())) == 2 and set(workers.values()) - first
    expected = [f"{verb} {key}" for key in workers for verb in ("logged", "printed", "shouted")]

    async def wait_for_log():
        await wait_until(lambda: all(line in server.log_path.read_text() for line in expected), "the log")

    runner.run(wait_for_log())
    log = server.log_path.read_text()
    for key, worker in workers.items():
        lines = re.findall(rf"^\S+ (\S+) (.*(?:logged|printed|shouted) {key})$", log, re.MULTILINE)
        assert sorted(lines) == [
            (worker, f"INFO x: logged {key}"),
            (worker, f"printed {key}"),
            (worker, f"shouted {key}"),
        ]


def test_train_and_eval_servers_of_one_name_have_separate_logs(engine, tmp_path):
    train, eval = (make_config(engine.url, tmp_path, kind=kind).select_source() for kind in ("train", "eval"))
    assert train.source_name == eval.source_name == "tricky"
    assert train.log_path(tmp_path) != eval.log_path(tmp_path)


def test_source_is_selected_by_key_and_unused_options_are_refused():
    sources = {"train": [{"taskset": {"id": "a"}}], "eval": [{"taskset": {"id": "a"}}]}
    inference = {"engine": "external", "base_url": ["http://x:1"]}
    config = EnvServerConfig.model_validate({**sources, "inference": inference})
    with pytest.raises(ConfigInvalid, match="train/a, eval/a"):
        config.select_source()
    assert config.model_copy(update={"source": "eval/a"}).select_source().kind == "eval"
    with pytest.raises(ConfigInvalid, match="unknown source 'eval/b'"):
        config.model_copy(update={"source": "eval/b"}).select_source()
    with pytest.raises(ValueError, match="multiplex"):
        EnvServerConfig.model_validate(
            {"train": [{"taskset": {"id": "a"}, "pool": {"type": "static", "multiplex": 3}}], "inference": inference}
        )
