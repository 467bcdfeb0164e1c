"""A run is opened, samples and is closed: its environment changes between starts, its processes move while it samples.

The tests use real env servers and an engine without a model. A run is opened, samples a few rollouts, and is closed.
"""

import asyncio
import contextlib
import os
import signal
from contextlib import AsyncExitStack

import pytest

from ramify.core.async_calls import cancel_all
from ramify.core.errors import EnvironmentChanged, PeerLost
from ramify.launch.run_directory import prepare_run_directory
from ramify.orchestrate.address_book import write_addresses
from ramify.orchestrate.background import measure_env_servers
from ramify.orchestrate.components import RunComponents
from ramify.orchestrate.connections import StartupReport
from ramify.orchestrate.run_config import RunConfig
from ramify.orchestrate.status import build_state, list_waits
from ramify.rollout.envserver import EnvServer, EnvServerConfig
from ramify.run.state import OrchestratorState
from ramify.run.store import Ledger, RunLog, RunStore
from ramify.run.store.audit import audit
from ramify.run.store.environments import ACCEPT_CHANGES_KEY
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.summary import REVISION_KEY
from ramify.trace.version import PolicyVersion
from tests.support.engine import ScriptedEngine, reply_cba, run_engine
from tests.support.env_server import StubEnvServer, reserve_address, restart_at
from tests.support.processes import async_wait_until as wait_until

pytestmark = pytest.mark.process

ENVIRONMENT = """
import asyncio
from pathlib import Path
import ramify as rf

class Words(rf.Taskset):
    def load(self):
        words = Path({data!r}).read_text().split()
        for number, word in enumerate(words):
            yield rf.Task(prompt=word, key=f"task-{{number}}")

    @rf.reward(weight={weight})
    async def any(self, task):
        while task.key == "task-1" and Path({hold!r}).exists():
            await asyncio.sleep(0.01)
        return 1.0
"""
WORDS = " ".join(f"word-{number}" for number in range(6))


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reply_cba, version=PolicyVersion("tiny"))) as engine:
        yield engine


class ChangingRun:
    """A run whose environment can be changed between its starts."""

    def __init__(self, directory, engine, fork_client):
        self.directory, self.engine, self.fork_client = directory, engine, fork_client
        self.data, self.path = directory / "words.txt", directory / "outputs" / "run"
        self.hold = directory / "hold"  # while it exists, attempts at the second task are not scored
        self.data.write_text(WORDS)
        self.write_environment()

    def write_environment(self, weight: float = 1.0) -> None:
        text = ENVIRONMENT.format(data=str(self.data), hold=str(self.hold), weight=weight)
        (self.directory / "words.py").write_text(text)

    @property
    def source(self) -> dict:
        taskset = {"id": str(self.directory / "words.py")}
        return {"name": "words", "taskset": taskset, "pool": {"type": "static", "workers": 1}}

    def server(self) -> EnvServer:
        config = {
            "train": [self.source],
            "inference": {"engine": "external", "base_url": [self.engine.url]},
            "output": self.directory,
            "shutdown_timeout": 0.1,
            "heartbeat_interval": 0.2,
        }
        return EnvServer(EnvServerConfig.model_validate(config), prefork_client=self.fork_client)

    def config(self, address: str) -> RunConfig:
        source = {key: value for key, value in self.source.items() if key != "pool"}
        return RunConfig.model_validate(
            {
                "name": "run",
                "output": self.directory / "outputs",
                "inference": {"engine": "external", "base_url": [self.engine.url]},
                "orchestrator": {"batch_size": 4, "group_size": 2, "filters": []},
                "train": [{**source, "address": address}],
            }
        )

    async def start(self, *, accept: bool = False, rollouts: int = 3) -> None:
        """Open the run like the orchestrator does, sample `rollouts` more rollouts, and close it."""
        async with self.server() as server, AsyncExitStack() as stack:
            config = self.config(server.address)
            assert prepare_run_directory(config, accept_changes=accept) is None
            run = RunComponents(config)
            await run.open(stack)
            before = len(run.store.rollouts())
            sampling = asyncio.create_task(run.dispatcher.run())
            await wait_until(lambda: len(run.store.rollouts()) >= before + rollouts, "rollouts")
            await cancel_all([sampling])

    @contextlib.contextmanager
    def ledger(self):
        with RunStore.open(self.path, write=False) as store:
            yield Ledger.open_readonly(store)


@pytest.fixture
def changing_run(tmp_path, engine, fork_client):
    return ChangingRun(tmp_path, engine, fork_client)


async def test_environment_changes_are_named_and_refused_unless_accepted(changing_run):
    changing_run.hold.touch()
    await changing_run.start()
    changing_run.hold.unlink()
    changing_run.write_environment(weight=0.5)
    changing_run.data.write_text(WORDS.replace("word-3", "other"))
    with pytest.raises(EnvironmentChanged) as refused:
        await changing_run.start()
    assert "words: words.py has changed" in refused.value.message
    assert "words: task 3 (task-3) has changed" in refused.value.message
    with changing_run.ledger() as ledger:
        unscored = {group.number for group in ledger.open_groups() if group.state is not GroupState.SCORED}
        assert unscored
    await changing_run.start(accept=True)
    with changing_run.ledger() as ledger:
        cancelled = {group.number for group in ledger.groups() if group.reason is DropReason.CANCELLED}
        assert cancelled == unscored  # their attempts would have been scored by two versions
        assert audit(ledger, finished=False) == []
        assert {row.summary[REVISION_KEY] for row in ledger.store.rollouts()} == {1, 2}
        (event,) = RunLog(ledger.store).events("changes accepted")
        assert event.fields["revisions"] == {"words": 2}
        assert not ledger.store.get_fact(ACCEPT_CHANGES_KEY)  # only this change was accepted


async def test_worker_that_loads_changed_code_is_refused(changing_run):
    async with changing_run.server() as server, AsyncExitStack() as stack:
        run = RunComponents(changing_run.config(server.address))
        await run.open(stack)
        changing_run.write_environment(weight=0.5)
        for worker in server.pool.workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(BaseExceptionGroup) as ended:
            async with asyncio.timeout(60):
                await run.dispatcher.run()
        assert ended.group_contains(EnvironmentChanged, match=r"words\.py")


async def test_server_restarted_with_changed_code_gets_no_rollout(changing_run):
    """The orchestrator keeps running and compares nothing, but every request has the digest of its environment."""
    async with AsyncExitStack() as stack:
        async with StubEnvServer(address=reserve_address()) as server:
            run = RunComponents(changing_run.config(server.address))
            await run.open(stack)
        async with await restart_at(server.address, "changed", environment="other") as changed:
            with pytest.raises(BaseExceptionGroup) as ended:
                async with asyncio.timeout(60):
                    await run.dispatcher.run()
        assert ended.group_contains(EnvironmentChanged)
        assert changed.started == []


async def test_wait_for_a_teacher_is_reported(tmp_path, engine, capsys):
    teacher = {"algorithm": {"id": "opd"}, "teacher": "teacher", "address": "tcp://127.0.0.1:1"}
    source = {"name": "words", "taskset": {"id": "reverse-text"}, **teacher}
    table = {
        "name": "run",
        "output": tmp_path,
        "inference": {"engine": "external", "base_url": [engine.url]},
        "models": {"teacher": {"base_url": ["http://127.0.0.1:9"]}},
        "launch": {"startup_timeout": 60.0},
        "train": [source],
    }
    config = RunConfig.model_validate(table)

    async def is_reported() -> bool:
        state = OrchestratorState.read(config.path)
        return (
            state is not None
            and state.startup_wait == "the orchestrator waits for models.teacher at http://127.0.0.1:9, up to 60 s"
        )

    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(RunComponents(config, report_interval=0.05).open(stack))
        await wait_until(is_reported, "a report")
        await cancel_all([opening])
    assert capsys.readouterr().out.count("waiting for models.teacher at http://127.0.0.1:9: ") == 1
    with RunStore.open(config.path) as store:
        assert [event.fields["what"] for event in RunLog(store).events("waiting")][-1].startswith("models.teacher")


async def test_report_keeps_what_a_start_that_failed_waited_for(tmp_path):
    source = {"name": "words", "taskset": {"id": "reverse-text"}, "address": "tcp://127.0.0.1:1"}
    inference = {"engine": "external", "base_url": ["http://127.0.0.1:9"]}
    table = {"name": "run", "output": tmp_path, "inference": inference, "train": [source]}
    config = RunConfig.model_validate(table)
    with RunStore.open(config.path) as store:
        report = StartupReport(config, RunLog(store), committed=0)
        with pytest.raises(PeerLost):
            async with report.waiting_for("the env servers of words", 60.0):
                raise PeerLost("words: no env server answers")
        assert [wait.waits_for for wait in OrchestratorState.read(config.path).waits] == ["the env servers of words"]
        async with report.waiting_for("the env servers of words", 60.0):
            pass
        assert OrchestratorState.read(config.path).waits == []


async def test_wait_for_tasks_is_reported_until_they_are_loaded(changing_run):
    async with StubEnvServer() as server, AsyncExitStack() as stack:
        server.may_list.clear()
        config = changing_run.config(server.address)

        async def is_reported() -> bool:
            state = OrchestratorState.read(config.path)
            return state is not None and state.startup_wait == "the orchestrator waits for the tasks of words"

        opening = asyncio.create_task(RunComponents(config, report_interval=0.05).open(stack))
        await wait_until(is_reported, "a report")
        server.may_list.set()
        await opening
        assert OrchestratorState.read(config.path).waits == []


def start_engine(stack: contextlib.ExitStack) -> ScriptedEngine:
    return stack.enter_context(run_engine(ScriptedEngine(reply_cba, version=PolicyVersion("tiny"), delay=0.05)))


async def move_everything(run: RunComponents, moving_run: ChangingRun, new_engine: ScriptedEngine) -> None:
    """Let the run sample, with each process at a new address than before."""

    async def sample_more(what: str) -> None:
        before = len(run.store.rollouts())
        await wait_until(lambda: len(run.store.rollouts()) >= before + 4, what)

    await sample_more("rollouts at the first addresses")
    async with moving_run.server() as second_server:
        first_address = run.sources["words"].servers.servers[0].address
        env_addresses = [first_address, second_server.address]
        write_addresses(run.config.path, {"inference": [new_engine.url], "env/train/words": env_addresses})
        await wait_until(lambda: len(run.sources["words"].servers.up_servers) == 2, "the second env server")
        await wait_until(lambda: list(run.client.versions) == [new_engine.url], "the new engine")
        await wait_until(lambda: len(new_engine.requests) >= 4, "rollouts on the new engine")
        metrics, servers = measure_env_servers(run.sources), run.sources["words"].servers.servers
        assert metrics.keys() == {f"env_servers/words/127.0.0.1/{name}" for name in ("in_flight", "done", "lost")}
        assert metrics["env_servers/words/127.0.0.1/done"] == sum(server.num_done for server in servers)
        write_addresses(run.config.path, {"env/train/words": [second_server.address]})
        await wait_until(lambda: len(run.sources["words"].servers.servers) == 1, "the first env server to be removed")
        await sample_more("rollouts on the second env server")
        (entry,) = build_state(run).env_servers["words"]
        assert entry.address == second_server.address and entry.done >= 1
        write_addresses(run.config.path, {"env/train/words": [second_server.address, "tcp://127.0.0.1:1"]})
        await wait_until(lambda: len(run.sources["words"].servers.servers) == 2, "a server that does not exist")
        waits = {wait.waits_for: wait for wait in list_waits(run)}
        assert waits["its env server at tcp://127.0.0.1:1"].who == "source words"
        assert not run.progress.failure_counts


async def test_run_follows_its_processes_to_new_addresses(fork_client, tmp_path):
    with contextlib.ExitStack() as engines:
        moving_run = ChangingRun(tmp_path, start_engine(engines), fork_client)
        new_engine = start_engine(engines)
        async with moving_run.server() as first_server, AsyncExitStack() as stack:
            config = moving_run.config(first_server.address)
            unbounded = config.orchestrator.model_copy(update={"max_staleness": 400, "max_concurrency": 2})
            run = RunComponents(config.model_copy(update={"orchestrator": unbounded}))
            await run.open(stack)
            sampling = asyncio.create_task(run.dispatcher.run())
            try:
                await move_everything(run, moving_run, new_engine)
            finally:
                await cancel_all([sampling])
        with moving_run.ledger() as ledger:
            assert audit(ledger, finished=False) == []
