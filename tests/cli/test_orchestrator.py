"""`ramify orchestrator`: it starts env servers for sources without an address, and they end with it."""

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from ramify.cli.app import main
from ramify.cli.orchestrator import make_print_atomic
from ramify.rollout.envserver import EnvServer, EnvServerConfig
from ramify.trace.version import PolicyVersion
from tests.support import environments
from tests.support.engine import ScriptedEngine, reply_cba, run_engine
from tests.support.processes import wait_until, wait_until_ended

pytestmark = pytest.mark.process

RUN = """
name = "run"
max_steps = 3
seq_len = 512

[inference]
engine = "external"
base_url = ["{url}"]

[orchestrator]
batch_size = 4
group_size = 2

[[train]]
name = "plain"
taskset = {{ id = "{file}:Plain" }}
pool = {{ type = "static", workers = 1 }}
"""
CHAT = """
[[eval]]
name = "elsewhere"
taskset = {{ id = "{file}:Plain" }}
pool = {{ type = "static", workers = 1 }}
num_tasks = 2
endpoint = {{ base_url = "{url}", model = "big" }}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orchestrator")
    with run_engine(ScriptedEngine(reply_cba, version=PolicyVersion("tiny"))) as engine:
        (folder / "run.toml").write_text(RUN.format(url=engine.url, file=environments.__file__))
        yield folder


@pytest.fixture(scope="module")
def chat():
    with run_engine(ScriptedEngine(lambda _: "hello", owner=None)) as engine:
        yield engine.url


@contextlib.contextmanager
def started(home, *args):
    """Run a part command; kill it and the processes of `family` on exit."""
    command = [sys.executable, "-m", "ramify", *args]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    family = []
    try:
        yield process, family
    finally:
        for one in [*family, psutil.Process(process.pid)] if process.returncode is None else family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.full("tests/launch has the supervisor's part")),
    ],
    ids=["killed", "terminated"],
)
def test_env_servers_run_rollouts_and_end_with_the_orchestrator(home, chat, number, code):
    """One source uses the run's engine and is trained on, the other uses a chat endpoint."""
    file, name = (home / "run.toml").read_text(), f"ended-{code}"
    (home / "eval.toml").write_text(file + CHAT.format(file=environments.__file__, url=chat))
    path = home / "outputs" / name
    log = path / "logs" / "orchestrator.log"
    with started(home, "orchestrator", "@", "eval.toml", "--name", name) as (process, family):
        wait_until(lambda: log.exists() and "eval at step 0: eval/elsewhere/avg 1.000" in log.read_text(), timeout=60)
        wait_until(lambda: sum(file.stat().st_size for file in path.glob("traces/*")) > 0)
        family += psutil.Process(process.pid).children(recursive=True)
        assert sum("ramify env-server @" in " ".join(one.cmdline()) for one in family) >= 2
        process.send_signal(number)
        assert process.wait(60) == code
        wait_until_ended(*family)


def test_unbuffered_lines_of_two_threads_are_not_mixed(tmp_path, monkeypatch):
    """`eval at step 0: eval/held-out/avg 0.000step=0 eval/held-out/avg=0`: once in the log of a run in a container."""
    unbuffered = (tmp_path / "log").open("wb", buffering=0)  # as stdout is with `python -u`
    with io.TextIOWrapper(unbuffered, write_through=True) as log:
        monkeypatch.setattr(sys, "stdout", log)
        make_print_atomic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda word: [print(word * 20, flush=True) for _ in range(2000)], "ab"))
    lines = (tmp_path / "log").read_text().splitlines()
    assert (len(lines), set(lines)) == (4000, {"a" * 20, "b" * 20})


async def test_chat_only_endpoint_is_refused_for_training(home, chat, capsys):
    source = {"name": "plain", "taskset": {"id": f"{environments.__file__}:Plain"}}
    source["pool"] = {"type": "static", "workers": 1}
    inference = {"engine": "external", "base_url": [chat]}
    config = {"train": [source], "inference": inference, "model": {"name": "big"}, "output": home / "chat"}
    async with EnvServer(EnvServerConfig.model_validate(config)) as server:
        where = ["--train.0.address", server.address, "--train.0.pool", '{"type": "elastic"}', "-o", str(home)]
        command = ["orchestrator", "@", str(home / "run.toml"), "--name", "refused", *where]
        assert await asyncio.to_thread(main, command) == 1
    assert "EngineIncompatible: train source plain" in capsys.readouterr().err


def test_status_address_is_recorded_without_a_supervisor(home, capsys):
    with started(home, "env-server", "@", "run.toml", "--source", "train/plain", "--address_file", "at") as _:
        wait_until(lambda: (home / "at").exists(), timeout=60)
        address = (home / "at").read_text().strip()
        pool = ["--train.0.pool", '{"type": "elastic"}', "--train.0.address", address]
        with started(home, "orchestrator", "@", "run.toml", *pool) as (process, family):
            line = ""
            while "trainer address" not in line:
                line = process.stdout.readline()
                assert line, "it ended"
            family += psutil.Process(process.pid).children(recursive=True)
            assert family == []  # the env server was started separately
            record = json.loads((home / "outputs" / "run" / "supervisor.json").read_text())
            assert record["status_address"] == line.split()[-1]
            assert main(["why", str(home / "outputs" / "run")]) == 0
            assert "a trainer" in capsys.readouterr().out
            process.terminate()
            assert process.wait(60) == 75


def test_sink_without_its_library_is_refused_before_start(home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    sinks = '[{"type": "trackio"}]'
    assert main(["orchestrator", "@", "run.toml", "--name", "unsunk", "--monitor.sinks", sinks]) == 2
    assert "monitor.sinks.0: trackio is not installed" in capsys.readouterr().err
    assert not (home / "outputs" / "unsunk").exists()


def test_model_without_an_address_is_refused_before_start(home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    models = '{"judge": {"name": "tiny"}}'
    assert main(["orchestrator", "@", "run.toml", "--name", "unserved", "--models", models]) == 2
    assert "models.judge.base_url: the orchestrator starts no engine" in capsys.readouterr().err
    assert not (home / "outputs" / "unserved").exists()
