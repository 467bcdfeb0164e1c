"""A training run whose environment has changed since it was started: shown, refused, or recorded.

Real env servers and an engine without a model; the run is opened as its process would, samples, and is left.
"""

import asyncio
import contextlib
import os
import signal
from contextlib import AsyncExitStack

import pytest

from ramify.envserver import EnvServer, EnvServerConfig
from ramify.errors import EnvironmentChanged
from ramify.launch.completion import get_finished_steps
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.run_context import RunContext
from ramify.store import Ledger, RunLog, RunStore
from ramify.store.audit import audit
from ramify.store.environments import ACCEPT_CHANGES_KEY
from ramify.store.group_state import DropReason, GroupState
from ramify.store.summary import REVISION_KEY
from tests.envserver.engine import instant
from tests.envserver.stage import until

ENVIRONMENT = """
from itertools import count
from pathlib import Path
import ramify as rf

class Words(rf.Taskset):
    def load(self):
        words = Path({data!r}).read_text().split()
        for number in range(len(words)) if {finite} else count():
            yield rf.Task(prompt=words[number % len(words)], key=f"task-{{number}}")

    @rf.reward(weight={weight})
    def any(self, trace):
        return 1.0
"""
WORDS = " ".join(f"word-{number}" for number in range(6))


@pytest.fixture(scope="module")
def engine():
    with instant() as engine:
        engine.version = engine.version._replace(policy="tiny", incarnation=0, step=0)
        yield engine


class Story:
    """One environment, and the starts of one run that learns from it."""

    def __init__(self, folder, engine):
        self.folder, self.engine = folder, engine
        self.data, self.path = folder / "words.txt", folder / "outputs" / "run"
        self.data.write_text(WORDS)
        self.write()

    def write(self, weight: float = 1.0, finite: bool = True) -> None:
        text = ENVIRONMENT.format(data=str(self.data), weight=weight, finite=finite)
        (self.folder / "words.py").write_text(text)

    @property
    def source(self) -> dict:
        taskset = {"id": str(self.folder / "words.py")}
        return {"name": "words", "taskset": taskset, "pool": {"type": "static", "workers": 1}}

    def server(self, address: str | None = None) -> EnvServer:
        config = {
            "train": [{**self.source, "address": address}],
            "inference": {"engine": "external", "base_url": [self.engine.url]},
            "output": self.folder,
            "grace": 0.1,
            "heartbeat": 0.2,
        }
        return EnvServer(EnvServerConfig.model_validate(config))

    def config(self, address: str) -> RunConfig:
        source = {key: value for key, value in self.source.items() if key != "pool"}
        return RunConfig.model_validate(
            {
                "name": "run",
                "output": self.folder / "outputs",
                "inference": {"engine": "external", "base_url": [self.engine.url]},
                "orchestrator": {"batch_size": 4, "group_size": 2, "filters": []},
                "train": [{**source, "address": address}],
            }
        )

    def start(self, *, accept: bool = False, rollouts: int = 3) -> None:
        """Open the run as its process does, sample until there are so many rollouts more, and leave it."""
        asyncio.run(self._start(accept, rollouts))

    async def _start(self, accept: bool, rollouts: int) -> None:
        async with self.server() as server, AsyncExitStack() as stack:
            config = self.config(server.address)
            assert get_finished_steps(config, accept_changes=accept) is None
            run = RunContext(config)
            await run.open(stack)
            before = len(run.store.rollouts())
            sampling = asyncio.create_task(run.sampling.run())
            await until(lambda: len(run.store.rollouts()) >= before + rollouts, "rollouts")
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    def ledger(self):
        @contextlib.contextmanager
        def opened():
            with RunStore.open(self.path, write=False) as store:
                yield Ledger.open_readonly(store)

        return opened()


@pytest.fixture
def story(tmp_path, engine):
    return Story(tmp_path, engine)


def test_a_changed_reward_weight_and_an_edited_task_are_refused_by_name_and_can_be_accepted(story):
    story.start()
    story.write(weight=0.5)
    story.data.write_text(WORDS.replace("word-3", "other"))
    with pytest.raises(EnvironmentChanged) as refused:
        story.start()
    assert "words: words.py has changed" in refused.value.message
    assert "words: task 3 (task-3) has changed" in refused.value.message
    with story.ledger() as ledger:
        unscored = {group.number for group in ledger.open_groups() if group.state is not GroupState.SCORED}
        assert unscored
    story.start(accept=True)
    with story.ledger() as ledger:
        cancelled = {group.number for group in ledger.groups() if group.reason is DropReason.CANCELLED}
        assert cancelled == unscored  # their attempts would have been scored by two versions
        assert audit(ledger, finished=False) == []
        assert {row.summary[REVISION_KEY] for row in ledger.store.rows()} == {1, 2}
        (event,) = RunLog(ledger.store).events("changes accepted")
        assert event.fields["revisions"] == {"words": 2}
        assert not ledger.store.fact(ACCEPT_CHANGES_KEY)  # what was accepted was this one change


def test_of_tasks_without_end_those_that_were_issued_are_compared(story, monkeypatch):
    monkeypatch.setattr("ramify.orchestrate.connected_source.MANY", 10)
    story.write(finite=False)
    story.start()
    story.data.write_text(WORDS.replace("word-0", "other"))
    with pytest.raises(EnvironmentChanged, match=r"words: task 0 \(task-0\) has changed"):
        story.start()


def test_a_worker_that_would_load_other_code_than_those_before_it_is_refused(story):
    async def play() -> None:
        async with story.server() as server, AsyncExitStack() as stack:
            run = RunContext(story.config(server.address))
            await run.open(stack)
            story.write(weight=0.5)
            for worker in server.pool.workers.values():
                os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(BaseExceptionGroup) as ended:
                async with asyncio.timeout(60):
                    await run.sampling.run()
            assert ended.group_contains(EnvironmentChanged, match=r"words\.py")

    asyncio.run(play())


def test_a_server_that_was_started_again_with_other_code_gets_no_rollout_of_the_run(story):
    """The orchestrator lives on, so nothing is compared: the request itself says what it is meant for."""

    async def play() -> None:
        async with story.server() as server, AsyncExitStack() as stack:
            config = story.config(server.address)
            run = RunContext(config)
            await run.open(stack)
            await server.close()
            story.write(weight=0.5)
            async with story.server(server.address):
                with pytest.raises(BaseExceptionGroup) as ended:
                    async with asyncio.timeout(60):
                        await run.sampling.run()
            assert ended.group_contains(EnvironmentChanged)

    asyncio.run(play())
