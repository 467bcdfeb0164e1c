"""A run without progress ends in time, with a named failure that lists what every component waits for.

The tests run one engine, one env server with a worker, and the orchestrator in this process. No trainer connects.
"""

import asyncio
import re
import resource
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.core.errors import (
    AgentFailed,
    EnvironmentFault,
    PeerLost,
    ProviderError,
    RunStalled,
    StorageFailed,
    StorageFull,
)
from ramify.orchestrate.orchestrator import Orchestrator
from ramify.orchestrate.run_config import RunConfig
from ramify.orchestrate.untrainable_groups import NoSignalSettings
from ramify.rollout.envserver import EnvServer, EnvServerConfig
from ramify.run.reader import ask_orchestrator
from ramify.run.state import OrchestratorState
from ramify.run.store import RunStore
from ramify.run.store.group_state import GroupState
from ramify.run.store.ledger import GroupRecord, Ledger
from ramify.run.store.run_log import RunLog
from ramify.trace.version import PolicyVersion
from tests.support import environments
from tests.support.engine import Exchange, ScriptedEngine, hang, reply_cba
from tests.support.processes import find_free_port
from tests.support.source_lines import line_number

pytestmark = pytest.mark.run

STALL = 3.0  # seconds without progress, in which a few groups are sampled also on a busy machine
ORCHESTRATOR = {"batch_size": 4, "group_size": 2, "stall_timeout": STALL, "max_untrainable_groups": None}
REPLY_DELAY = 0.1  # seconds, so that a run that samples until it stalls does not keep a core busy
TEST_TIMEOUT = 60.0  # seconds after which a stall was not detected


class MeteredEngine(ScriptedEngine):
    """An engine that reports the number of running calls."""

    def __init__(self) -> None:
        super().__init__(reply_cba, version=PolicyVersion("tiny"))
        self.num_running = 0

    async def control(self, path: str, exchange: Exchange) -> None:
        if path != "/metrics":
            await super().control(path, exchange)
            return
        await exchange.reply(f"ramify_running {self.num_running}\n")

    async def hold(self, _: ScriptedEngine, exchange: Exchange) -> None:
        """Never finish a generation."""
        self.num_running += 1
        try:
            await hang(self, exchange)
        finally:
            self.num_running -= 1


class Stage:
    """Engine, env server and orchestrator on one event loop, without a trainer."""

    def __init__(self, runner: asyncio.Runner, engine: MeteredEngine, server: EnvServer, gate, home) -> None:
        self.runner, self.engine, self.server, self.gate, self.home = runner, engine, server, gate, home
        self._default_behaviour = engine.behaviour

    def run(self, name: str, **more) -> int:
        source = {
            "name": "plain",
            "taskset": {"id": f"{environments.__file__}:Plain", "gate": str(self.gate)},
            "address": more.pop("address", self.server.address),
            "curriculum": more.pop("curriculum", {}),
        }
        self.engine.delay = more.pop("reply_delay", 0.0)
        config = {
            "name": name,
            "output": more.pop("output", self.home),
            "max_steps": 3,
            "seq_len": 512,
            "orchestrator": {**ORCHESTRATOR, **more.pop("orchestrator", {})},
            "inference": {"engine": "external", "base_url": [more.pop("url", self.engine.url)]},
            "launch": {"startup_timeout": more.pop("startup_timeout", 60.0)},
            "train": [source],
        }
        started_at = time.monotonic()
        try:
            orchestrator = Orchestrator(RunConfig.model_validate(config), **more)
            return self.runner.run(orchestrator.run())
        finally:
            self.engine.behaviour, self.engine.delay = self._default_behaviour, 0.0
            self.gate.unlink(missing_ok=True)
            assert time.monotonic() - started_at < TEST_TIMEOUT


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    home = tmp_path_factory.mktemp("stalls")
    gate = home / "gate"
    with asyncio.Runner() as runner:
        engine = MeteredEngine()
        runner.run(engine.__aenter__())
        source = {
            "name": "plain",
            "taskset": {"id": f"{environments.__file__}:Plain", "gate": str(gate)},
            "pool": {"type": "static", "workers": 1},
        }
        inference = {"engine": "external", "base_url": [engine.url]}
        config = {
            "train": [source],
            "inference": inference,
            "output": home,
            "shutdown_timeout": 0.2,
            "heartbeat_interval": 0.2,
        }
        server = EnvServer(EnvServerConfig.model_validate(config))
        runner.run(server.start())
        yield Stage(runner, engine, server, gate, home)
        runner.run(server.close())
        runner.run(engine.__aexit__())


def test_engine_that_never_answers(stage):
    stage.engine.behaviour = stage.engine.hold
    with pytest.raises(RunStalled) as stalled:
        stage.run("engine")
    message = stalled.value.message
    assert f"env servers waits for {{}} model calls (running on the engines at {stage.engine.url})" in _mask_numbers(
        message
    )
    oldest = f"oldest attempt 0.0: {{}} s (timeout {{}} s), source plain at {stage.server.address}"
    assert f"sampling waits for {{}} attempts ({oldest}" in _mask_numbers(message)
    assert (stage.home / "engine" / "stalled.txt").read_text() == message + "\n"


def test_environment_that_never_returns(stage):
    stage.gate.touch()
    with pytest.raises(RunStalled) as stalled:
        stage.run("environment")
    message = stalled.value.message
    assert f"source plain at {stage.server.address}" in message
    assert "model calls" not in message  # the engine is idle


def test_groups_without_training_signal_are_shown_early_and_warned_about_again_and_again(stage):
    polls: list[asyncio.Task[None]] = []
    states: list[OrchestratorState] = []

    async def poll(address: str) -> None:
        while not states or not (states[-1].trainable or (0, 0))[1] or not states[-1].dropped:
            states.append(await asyncio.to_thread(ask_orchestrator, address))

    with pytest.raises(RunStalled, match=r"dropped groups: \d+ × filtered: .*zero_advantage") as stalled:
        stage.run(
            "nothing",
            reply_delay=REPLY_DELAY,
            orchestrator={"max_untrainable_groups": 2, "on_no_signal": "warn"},
            on_status_address=lambda address: polls.append(asyncio.create_task(poll(address))),
        )
    assert "orchestrator waits for a trainer (no trainer has connected)" in stalled.value.message
    assert polls[0].done() and polls[0].exception() is None
    state = states[-1]
    assert (state.step, state.reward, state.trainable[0], state.reward_history) == (0, 1.0, 0, [])
    assert re.fullmatch(r"\d+ × filtered: zero_advantage", state.dropped)
    with RunStore.open(stage.home / "nothing", write=False) as store:
        warnings = [event.fields for event in RunLog(store).events("failure")]
    assert len(warnings) >= 2
    assert {warning["name"] for warning in warnings} == {"RunStalled"}


def test_equal_rewards_end_the_run_after_a_warning_with_a_description_of_the_groups(stage):
    with pytest.raises(RunStalled) as ended:
        stage.run(
            "equal",
            orchestrator={"max_untrainable_groups": 12, "stall_timeout": TEST_TIMEOUT, "max_concurrency": 2},
            no_signal_settings=NoSignalSettings(warning_groups=3),
        )
    first, source, reasons, reply, _ = ended.value.message.split("\n")
    count = re.fullmatch(
        r"none of the last (\d+) groups can be trained on \(orchestrator.max_untrainable_groups is 12\)", first
    )
    assert count and int(count[1]) >= 12
    pattern = r"  plain: (\d+) groups, (\d+) rollouts, reward mean 1, min 1, max 1"
    match = re.fullmatch(pattern, source)
    assert match
    groups, rollouts = match.groups()
    assert (groups, int(rollouts)) == (count[1], 2 * int(count[1]))
    assert reasons == f"  dropped groups: {groups} × filtered: zero_advantage"
    assert re.fullmatch(r"  a reply to 'say \d': '.+'", reply)
    with RunStore.open(stage.home / "equal", write=False) as store:
        (warning,) = [event.fields for event in RunLog(store).events("failure")]
    assert warning["name"] == "RunStalled"
    pattern = r"warning: none of the last \d groups can be trained on \(orchestrator.max_untrainable_groups is 12\)"
    assert re.fullmatch(pattern, warning["message"].partition("\n")[0])


def test_count_of_untrainable_groups_survives_a_restart_until_it_is_reported(stage):
    with pytest.raises(RunStalled, match=r"dropped groups: 8 × filtered"):  # for the count, this is like a kill
        stage.run("again", curriculum={"type": "shuffle", "epochs": 1}, orchestrator={"max_untrainable_groups": 10})
    for more in range(2):
        with pytest.raises(RunStalled) as ended:
            stage.run(
                "again",
                orchestrator={"max_untrainable_groups": 10, "stall_timeout": TEST_TIMEOUT, "max_concurrency": 1},
            )
        match = re.search(r"the last (\d+) groups", ended.value.message)
        assert match
        count = int(match[1])
        assert 10 <= count < 18  # with the 8 groups of the first start, but not the groups of a reported end
        assert len(read_dropped_groups(stage.home / "again")) >= 10 * (more + 1)


def read_dropped_groups(path: Path) -> list[GroupRecord]:
    with RunStore.open(path, write=False) as store:
        return [group for group in Ledger.open_readonly(store).groups() if group.state is GroupState.DROPPED]


@pytest.mark.parametrize(
    ("gate", "failure", "end", "problem"),
    [
        ("broken", EnvironmentFault, "failed in environment code", "setup: ValueError: there is no such thing"),
        ("exit", AgentFailed, "ended before the first reply", "code 2: can't open file 'nope.py'"),
        (
            "quit",
            AgentFailed,
            "were refused, or exited with an error",
            "the program exited with code 3 after a reply: no such tool",
        ),
    ],
)
def test_environments_and_agents_that_always_fail(stage, capsys, gate, failure, end, problem):
    stage.gate.write_text(gate)
    with pytest.raises(failure) as ended:
        stage.run(
            gate,
            orchestrator={"stall_timeout": TEST_TIMEOUT},
            no_signal_settings=NoSignalSettings(max_fruitless_attempts=6),
        )
    count = re.match(rf"plain: all (\d+) attempts {end}; last error: {re.escape(problem)}", ended.value.message)
    assert count
    logged = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"plain: {failure.name}: ")]
    assert len(logged) == 1 and problem in logged[0]
    assert main(["why", str(stage.home / gate)]) == 0
    pattern = rf"^\d+ of \d+ attempts ended as {failure.name} in plain: {re.escape(problem)}.*$"
    line = re.search(pattern, capsys.readouterr().out, re.M)
    assert line
    if gate == "broken":
        text = 'raise ValueError("there is no such thing")'
        raised = f"environments.py:{line_number(environments, text)} in setup: {text}"
        assert all(raised in message for message in (ended.value.message, logged[0], line[0]))
    if gate == "quit":
        with RunStore.open(stage.home / gate, write=False) as store:
            assert [point.value for point in RunLog(store).metrics("failures/AgentFailed")] >= [float(count[1])]


def test_tasks_run_out_before_the_first_batch_and_single_errors_do_not_end_the_run(stage):
    with pytest.raises(RunStalled, match=r"no batch was formed .* dropped groups: \d+ × filtered: .*zero_advantage"):
        stage.run("epoch", curriculum={"type": "shuffle", "epochs": 1}, orchestrator={"stall_timeout": TEST_TIMEOUT})
    stage.gate.write_text("exit")
    with pytest.raises(RunStalled):
        stage.run(
            "epoch",
            curriculum={"type": "shuffle", "epochs": 2},
            no_signal_settings=NoSignalSettings(max_fruitless_attempts=1),
        )


@pytest.mark.parametrize("is_listening", [False, True], ids=["down", "silent"])
def test_inference_server_does_not_answer(stage, is_listening):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if is_listening:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ProviderError, match=rf"no inference server came up within 1 s: {url}"):
            stage.run(f"silent-{is_listening}", url=url, startup_timeout=1.0)


def test_env_server_is_down(stage):
    address = f"tcp://127.0.0.1:{find_free_port()}"
    with pytest.raises(PeerLost, match=rf"the env server of source plain was not reachable within 1 s: {address}"):
        stage.run("address", address=address, startup_timeout=1.0)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte or, if it cannot be mounted, a limit of the file size."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if not mounted.returncode:
        yield tmp_path
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_is_full(stage, small_disk):
    """Groups are issued until the disk is full."""
    with pytest.raises((StorageFull, StorageFailed), match=rf"{small_disk}/disk .*; what was finished is kept"):
        stage.run("disk", output=small_disk, orchestrator={"stall_timeout": TEST_TIMEOUT})


def _mask_numbers(text: str) -> str:
    """Replace the numbers of a text by `{}`."""
    words = text.split(" ")
    return " ".join("{}" if word.isdigit() else word for word in words)
