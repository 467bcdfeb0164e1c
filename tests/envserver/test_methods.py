"""What an env server offers, and its log."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.env import Task
from ramify.envserver import EnvServer, EnvServerConfig, env_worker
from ramify.envserver.env_worker import TaskPager
from ramify.errors import ConfigInvalid, RequestInvalid
from ramify.orchestrate.config import EvalSourceConfig, TrainSourceConfig
from ramify.orchestrate.connected_source import connect_source
from ramify.wire import WireMessage
from tests.envserver.stage import configured, task, until


def test_a_rollout_is_scored_and_can_be_watched_while_it_grows(shared):
    runner, _, client = shared
    seen: list[tuple[str, int]] = []

    async def one():
        return await client.run(
            task(3),
            id="r3",
            group="g",
            attempt=2,
            seed=5,
            on_progress=lambda *news: seen.append((news[0], len(news[1].nodes))),
        )

    done = runner.run(one())
    trace = done.episode.traces[0]
    assert (trace.id, trace.group, trace.attempt, trace.task) == ("r3", "g", 2, task(3))
    assert trace.rewards == {"right": (1.0, 1.0), "rank": None}
    assert [phase for phase, _ in seen] == ["boot", "setup", "harness", "turn", "scoring", "done"]
    assert [nodes for phase, nodes in seen if phase == "turn"] == [len(trace.nodes)] == [2]
    assert (done.num_starts, done.crashes) == (1, 0)


def test_a_rollout_that_the_environment_breaks_is_an_episode_with_a_failure(shared):
    runner, _, client = shared
    trace = runner.run(client.run(task(1, does="raise"), id="r")).episode.traces[0]
    assert [error.name for error in trace.errors] == ["EnvironmentFault"]
    assert trace.rewards["right"] is None


def test_tasks_come_in_pages_with_their_identity(shared):
    runner, _, client = shared
    pages = [runner.run(client.tasks(start, 4)) for start in (0, 4, 8, 4, 12)]
    assert [[entry.identity for entry in page.tasks] for page in pages] == [
        [f"task-{number}" for number in range(start, min(start + 4, 10))] for start in (0, 4, 8, 4, 12)
    ]
    assert [page.end for page in pages] == [False, False, True, False, True]
    assert pages[0].tasks[2].task == task(2)


def test_info_says_how_many_tasks_there_are(shared):
    runner, _, client = shared
    assert runner.run(client.info()).num_tasks == 10
    assert runner.run(client.info(count_tasks=False)).num_tasks is None


def test_tasks_without_end_are_counted_as_null(monkeypatch):
    monkeypatch.setattr(env_worker, "MAX_COUNTED_TASKS", 50)
    endless: Any = SimpleNamespace(name="endless", iter_tasks=lambda: (Task() for _ in itertools.count()))
    exact: Any = SimpleNamespace(name="exact", iter_tasks=lambda: (Task() for _ in range(50)))
    assert (TaskPager(endless).count(), TaskPager(exact).count()) == (None, 50)


def test_a_request_with_an_unknown_key_is_refused(shared):
    """A client of another version must not believe that what it asked for was done."""
    runner, _, client = shared
    asked = {"start": 0, "count": 1, "shuffled": True}
    with pytest.raises(RequestInvalid, match="shuffled"):
        runner.run(client._client.call("tasks", WireMessage.encode(asked), timeout=30.0))


def test_a_group_is_scored_together(shared):
    runner, _, client = shared

    async def group():
        done = await asyncio.gather(*(client.run(task(1), id=f"g{n}") for n in range(3)))
        return await client.score_group(task(1), [one.episode.traces[0] for one in done])

    scores = runner.run(group())
    assert [entry["rank"] for entry in scores.rewards] == [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5)]
    assert scores.errors == [[], [], []]


def test_info_says_what_is_served_and_sampling_can_be_overridden(shared):
    runner, _, client = shared
    info = runner.run(client.info())
    assert (info.name, info.model, info.trainable) == ("tricky", "tiny", True)
    assert (info.rewards, info.group_rewards) == ({"right": 1.0}, {"rank": 0.5})
    trace = runner.run(client.run(task(1), id="r", sampling={"temperature": 0.5})).episode.traces[0]
    assert trace.sampler["sampling"]["temperature"] == 0.5
    with pytest.raises(RequestInvalid, match="sampling"):
        runner.run(client.run(task(1), id="r", sampling={"heat": 1}))


def test_workers_never_import_torch(shared):
    _, server, _ = shared
    for worker in server.pool._ready_workers():
        assert "torch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_all_that_a_worker_says_is_in_the_log_once_and_with_its_name(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    def ready_ids() -> set[str]:
        return {worker.id for worker in server.pool._ready_workers()}

    first = ready_ids()

    async def talk():
        os.kill(server.pool._ready_workers()[0].pid, signal.SIGKILL)  # one of the two is started later
        await until(
            lambda: len({worker.id for worker in server.pool._ready_workers()} - first) == 1, "the later worker"
        )
        rollouts = [
            asyncio.create_task(client.run(task(n, does="talk", gate=str(gate)), id=f"t{n}")) for n in range(200, 206)
        ]
        await until(lambda: (tmp_path / "gate.begun").exists() and begun() == 6, "six rollouts at the gate")
        gate.touch()
        return await asyncio.gather(*rollouts)

    def begun() -> int:
        return len((tmp_path / "gate.begun").read_text().splitlines())

    workers = {f"task-{200 + at}": done.worker_id for at, done in enumerate(runner.run(talk()))}
    assert len(set(workers.values())) == 2 and set(workers.values()) - first
    said = [f"{said} {key}" for key in workers for said in ("logged", "printed", "shouted")]

    async def written():
        await until(lambda: all(line in server.log_path.read_text() for line in said), "the log")

    runner.run(written())
    log = server.log_path.read_text()
    for key, worker in workers.items():
        found = re.findall(rf"^\S+ (\S+) (.*(?:logged|printed|shouted) {key})$", log, re.MULTILINE)
        assert sorted(found) == [
            (worker, f"INFO x: logged {key}"),
            (worker, f"printed {key}"),
            (worker, f"shouted {key}"),
        ]


def test_train_and_eval_servers_of_one_name_write_separate_files(engine, tmp_path):
    train, eval = (configured(engine.url, tmp_path, kind=kind).select_source() for kind in ("train", "eval"))
    assert train.source_name == eval.source_name == "tricky"
    assert train.log_path(tmp_path) != eval.log_path(tmp_path)


def test_a_source_is_picked_by_name_and_what_is_inert_is_refused():
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


def test_a_server_without_any_reward_is_refused_before_it_is_trained_on(engine, tmp_path):
    """An env server that somebody else started: the run has not seen its taskset before."""

    async def connect(kind: type) -> None:
        served = configured(engine.url, tmp_path, cls="Unrewarded", pool={"type": "static", "workers": 1})
        async with EnvServer(served) as server, contextlib.AsyncExitStack() as stack:
            source = kind(name="silent", taskset={"id": "elsewhere"}, address=server.address)
            await connect_source(source, stack, timeout=60.0, secret=None)

    asyncio.run(connect(EvalSourceConfig))
    with pytest.raises(ConfigInvalid, match="train source silent: its taskset has no reward"):
        asyncio.run(connect(TrainSourceConfig))
