"""A run that cannot go on ends inside its deadline, by a name, and says who waited for what.

One engine, one env server with a worker of its own, and the orchestrator in this process; no trainer ever comes.
"""

import asyncio
import re
import resource
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ramify.cli import main
from ramify.envserver import EnvServer, EnvServerConfig
from ramify.errors import (
    EnvironmentFault,
    NoTrainableGroups,
    PeerLost,
    ProviderError,
    RunStalled,
    StorageFailed,
    StorageFull,
)
from ramify.launch.status_client import StatusClient
from ramify.orchestrate import background
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.orchestrator import Orchestrator
from ramify.store import RunStore
from ramify.store.group_state import GroupState
from ramify.store.ledger import GroupRecord, Ledger
from ramify.store.run_log import RunLog
from ramify.trace.version import PolicyVersion
from tests.client.fake import Exchange, Fake, hang
from tests.envserver.engine import Instant
from tests.rl import environments
from tests.source_lines import line_number

STALL = 2.0  # seconds without progress
ORCHESTRATOR = {"batch_size": 4, "group_size": 2, "stall_timeout": STALL, "patience": None}
LATE = 20.0  # seconds after which a stall was not seen


class Engine(Instant):
    """Says how many calls it holds, as real ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.version = PolicyVersion("tiny", 0, 0)
        self.holds = 0

    async def control(self, path: str, exchange: Exchange) -> None:
        if path != "/metrics":
            await super().control(path, exchange)
            return
        text = f"ramify_running {self.holds}\n".encode()
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await exchange.writer.drain()

    async def hold(self, _: Fake, exchange: Exchange) -> None:
        """A generation that never comes to its end."""
        self.holds += 1
        try:
            await hang(self, exchange)
        finally:
            self.holds -= 1


class Stage:
    """Everything but the trainer, on one event loop."""

    def __init__(self, runner: asyncio.Runner, engine: Engine, server: EnvServer, gate, home) -> None:
        self.runner, self.engine, self.server, self.gate, self.home = runner, engine, server, gate, home
        self._answers = engine.behaviour

    def run(self, name: str, **more) -> int:
        source = {
            "name": "plain",
            "taskset": {"id": f"{environments.__file__}:Plain", "gate": str(self.gate)},
            "address": more.pop("address", self.server.address),
            "curriculum": more.pop("curriculum", {}),
        }
        config = {
            "name": name,
            "output": more.pop("output", self.home),
            "max_steps": 3,
            "seq_len": 512,
            "orchestrator": {
                "batch_size": 4,
                "group_size": 2,
                "stall_timeout": STALL,
                "patience": None,
                **more.pop("orchestrator", {}),
            },
            "inference": {"engine": "external", "base_url": [more.pop("url", self.engine.url)]},
            "launch": {"start_deadline": 2.0},
            "train": [source],
        }
        began, answers = time.monotonic(), more.pop("answers", None)
        try:
            return self.runner.run(Orchestrator(RunConfig.model_validate(config), on_status_address=answers).run())
        finally:
            self.engine.behaviour = self._answers
            self.gate.unlink(missing_ok=True)
            assert time.monotonic() - began < LATE


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    home = tmp_path_factory.mktemp("stalls")
    gate = home / "gate"
    with asyncio.Runner() as runner:
        engine = Engine()
        runner.run(engine.__aenter__())
        source = {
            "name": "plain",
            "taskset": {"id": f"{environments.__file__}:Plain", "gate": str(gate)},
            "pool": {"type": "static", "workers": 1},
        }
        inference = {"engine": "external", "base_url": [engine.url]}
        config = {"train": [source], "inference": inference, "output": home, "grace": 0.2, "heartbeat": 0.2}
        server = EnvServer(EnvServerConfig.model_validate(config))
        runner.run(server.start())
        yield Stage(runner, engine, server, gate, home)
        runner.run(server.close())
        runner.run(engine.__aexit__())


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_an_engine_that_accepts_and_never_answers(stage):
    stage.engine.behaviour = stage.engine.hold
    with pytest.raises(RunStalled) as stalled:
        stage.run("engine")
    said = stalled.value.message
    assert f"env servers waits for {{}} model calls (running on the engines at {stage.engine.url})" in _uncounted(said)
    oldest = f"oldest attempt 0.0: {{}} s (timeout {{}} s), source plain at {stage.server.address}"
    assert f"sampling waits for {{}} attempts ({oldest}" in _uncounted(said)
    assert (stage.home / "engine" / "stalled.txt").read_text() == said + "\n"


def test_an_environment_that_never_returns(stage):
    stage.gate.touch()
    with pytest.raises(RunStalled) as stalled:
        stage.run("environment")
    said = stalled.value.message
    assert f"source plain at {stage.server.address}" in said
    assert "model calls" not in said  # the engine is not what keeps them


def test_groups_that_teach_nothing(stage):
    with pytest.raises(RunStalled, match=r"dropped groups: \d+ × filtered: .*zero_advantage") as stalled:
        stage.run("nothing")
    assert "orchestrator waits for a trainer (no trainer has connected)" in stalled.value.message


def test_groups_that_teach_nothing_are_seen_long_before(stage):
    asked: list[asyncio.Task[None]] = []
    status: dict[str, Any] = {}

    async def ask(client: StatusClient) -> None:
        while not status.get("trainable", [0, 0])[1]:
            status.update(await client.get_async())
        status["dropped"] = await client.get_async("/dropped")

    with pytest.raises(RunStalled):
        stage.run("seen", answers=lambda address: asked.append(asyncio.create_task(ask(StatusClient(address)))))
    assert asked[0].done() and asked[0].exception() is None
    assert (status["step"], status["reward"], status["trainable"][0]) == (0, 1.0, 0)
    assert status["reward_history"] == []
    assert re.fullmatch(r"\d+ × filtered: zero_advantage", status["dropped"])


def test_a_run_whose_every_reward_is_equal_ends_by_name_with_what_was_seen(stage):
    with pytest.raises(NoTrainableGroups) as ended:
        stage.run("equal", orchestrator={"patience": 5, "stall_timeout": 60.0})
    said = ended.value.message
    first, source, reasons, reply, _ = said.split("\n")
    count = re.fullmatch(r"none of the last (\d+) groups can be trained on \(orchestrator.patience is 5\)", first)
    assert count and int(count[1]) >= 5
    seen = r"  plain: (\d+) groups, (\d+) rollouts, reward mean 1, min 1, max 1"
    groups, rollouts = re.fullmatch(seen, source).groups()
    assert (groups, int(rollouts)) == (count[1], 2 * int(count[1]))
    assert reasons == f"  dropped groups: {groups} × filtered: zero_advantage"
    assert re.fullmatch(r"  a reply to 'say \d': '.+'", reply)


def test_the_count_of_groups_survives_a_restart_but_not_its_own_end(stage):
    with pytest.raises(RunStalled, match=r"dropped groups: 8 × filtered"):  # killed, as far as the count knows
        stage.run("again", curriculum={"type": "shuffle", "epochs": 1}, orchestrator={"patience": 10})
    for more in range(2):
        with pytest.raises(NoTrainableGroups) as ended:
            stage.run("again", orchestrator={"patience": 10, "stall_timeout": 60.0, "max_concurrency": 1})
        count = int(re.search(r"the last (\d+) groups", ended.value.message)[1])
        assert 10 <= count < 18  # one that forgot would need ten more than the eight, one that remembers too much none
        assert len(judged(stage.home / "again")) >= 10 * (more + 1)


def test_a_run_that_only_warns_goes_on_and_warns_again(stage):
    with pytest.raises(RunStalled):
        stage.run("warned", orchestrator={"patience": 5, "on_no_signal": "warn"})
    with RunStore.open(stage.home / "warned", write=False) as store:
        warnings = [event.fields for event in RunLog(store).events("failure")]
    assert len(warnings) >= 2
    assert {warning["name"] for warning in warnings} == {"NoTrainableGroups"}


def judged(path: Path) -> list[GroupRecord]:
    with RunStore.open(path, write=False) as store:
        return [group for group in Ledger.open_readonly(store).groups() if group.state is GroupState.DROPPED]


def test_an_environment_whose_code_is_broken(stage, monkeypatch, capsys):
    monkeypatch.setattr(background, "MAX_ENVIRONMENT_FAULTS", 6)
    stage.gate.write_text("broken")
    with pytest.raises(
        EnvironmentFault, match=r"plain: all \d+ attempts failed in environment code; .*no such thing"
    ) as ended:
        stage.run("broken", orchestrator={"stall_timeout": 60.0})
    text = 'raise ValueError("there is no such thing")'
    raised = f"environments.py:{line_number(environments, text)} in setup: {text}"
    assert raised in ended.value.message
    logged = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("plain: EnvironmentFault: setup")
    ]
    assert len(logged) == 1 and raised in logged[0]
    assert main(["why", str(stage.home / "broken")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " × EnvironmentFault in plain" in line)
    assert raised in line


def test_tasks_that_end_before_anything_was_learnt(stage):
    with pytest.raises(RunStalled, match=r"the tasks ended .* dropped groups: \d+ × filtered: .*zero_advantage"):
        stage.run("epoch", curriculum={"type": "shuffle", "epochs": 1}, orchestrator={"stall_timeout": 60.0})


def test_an_inference_server_that_is_down(stage):
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(ProviderError, match=rf"no inference server came up within 2 s: {url}"):
        stage.run("url", url=url)


def test_an_inference_server_that_never_says_a_word(stage):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ProviderError, match=rf"no inference server came up within 2 s: {url}"):
            stage.run("silent", url=url)


def test_an_env_server_that_is_down(stage):
    address = f"tcp://127.0.0.1:{closed_port()}"
    with pytest.raises(PeerLost, match=rf"waits for the env server of plain: no answer from {address} for 2 s"):
        stage.run("address", address=address)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte; files that may not grow where no such thing can be made."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if not done.returncode:
        yield tmp_path
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full(stage, small_disk):
    """Groups without end, each with its rollouts."""
    with pytest.raises((StorageFull, StorageFailed), match=rf"{small_disk}/disk .*; what was finished is kept"):
        stage.run("disk", output=small_disk, orchestrator={"stall_timeout": LATE})


def _uncounted(text: str) -> str:
    """The text with its plain numbers left out."""
    words = text.split(" ")
    return " ".join("{}" if word.isdigit() else word for word in words)
