"""Starting vLLM, with programs that start, hang, exit and leave children behind; and its config."""

import asyncio
import json
import signal
import subprocess
import sys
import textwrap

import pytest

from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProviderError
from ramify.infer import vllm_server
from ramify.infer.config import EngineConfig, ServeConfig, ServerConfig, VLLMConfig
from ramify.infer.vllm_server import VLLMServer, VLLMServerState
from tests.support.processes import is_running, wait_until_ended

pytestmark = pytest.mark.process

SERVER_PROGRAM = """
    import json, os, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
    print("child", child.pid, flush=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200), self.end_headers()

        def do_POST(self):
            print("posted", self.path, self.rfile.read(int(self.headers["Content-Length"])).decode(), flush=True)
            if os.environ.get("HANGS"):
                time.sleep(600)
            if os.environ.get("EXITS_WITHOUT_RESPONSE"):
                os._exit(9)
            self.send_response(200), self.end_headers()
            if os.environ.get("EXITS"):
                print("out of memory", flush=True)
                os._exit(9)

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def launch(tmp_path):
    """Build a server whose interpreter runs `program`, whatever its arguments are."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def build(program: str, **settings) -> VLLMServer:
        python = tmp_path / "python"
        python.write_text(f"#!{sys.executable}\n{textwrap.dedent(program)}")
        python.chmod(0o755)
        config = VLLMConfig(python=str(python), log_file=str(tmp_path / "logs" / "vllm.log"), **settings)
        return VLLMServer(str(tmp_path / "model"), config, ServerConfig(port=0, shutdown_timeout=0.5))

    return build


def read_child_pid(server: VLLMServer) -> int:
    return next(int(line.split()[1]) for line in server.log.tail().splitlines() if line.startswith("child"))


async def test_server_is_started_and_stopped_with_its_children(launch):
    server = launch(SERVER_PROGRAM)
    async with asyncio.timeout(90), server:
        assert server.state is VLLMServerState.READY
        posted = next(line for line in server.log.tail().splitlines() if line.startswith("posted"))
        assert json.loads(posted.split(maxsplit=2)[2]) == {"new_version": "model@0.0"}
        assert is_running(read_child_pid(server))
    assert server.state is VLLMServerState.STOPPED
    wait_until_ended(read_child_pid(server))  # it ignores SIGTERM


async def test_failed_start_shows_the_end_of_the_log(launch):
    server = launch("print('loading'); raise SystemExit('No module named vllm')")
    with pytest.raises(ProviderError, match=r"(?s)exit code 1.*loading.*No module named vllm"):
        await asyncio.wait_for(server.start(), 90)
    assert server.state is VLLMServerState.STOPPED


async def test_unhealthy_server_is_ended_at_the_deadline(launch):
    server = launch("import time; print('compiling', flush=True); time.sleep(600)", startup_timeout=3.0)
    with pytest.raises(DeadlineExceeded, match=r"(?s)did not answer within 3 s.*compiling"):
        await asyncio.wait_for(server.start(), 90)
    assert server._child.exit_code is not None


async def test_server_that_hangs_before_it_has_its_version_is_ended_at_the_deadline(launch, monkeypatch):
    monkeypatch.setattr(vllm_server, "RESPONSE_TIMEOUT", 1.0)
    server = launch(SERVER_PROGRAM, extra_env={"HANGS": "1"}, startup_timeout=4.0)
    with pytest.raises(DeadlineExceeded, match=r"(?s)did not answer within 4 s.*posted /update_weight_version"):
        await asyncio.wait_for(server.start(), 90)
    wait_until_ended(read_child_pid(server))


async def test_server_that_exits_before_it_has_its_version_is_reported(launch):
    server = launch(SERVER_PROGRAM, extra_env={"EXITS_WITHOUT_RESPONSE": "1"})
    with pytest.raises(ProviderError, match=r"(?s)exit code 9.*posted /update_weight_version"):
        await asyncio.wait_for(server.start(), 90)


async def test_exit_of_the_server_is_reported(launch):
    server = launch(SERVER_PROGRAM, extra_env={"EXITS": "1"})
    async with asyncio.timeout(90), server:
        with pytest.raises(ProviderError, match=r"(?s)exit code 9.*out of memory"):
            await server.wait()
    wait_until_ended(read_child_pid(server))


def test_serve_command_runs_until_sigterm(launch):
    server = launch(SERVER_PROGRAM)
    flags = ["--inference.engine", "vllm", "--inference.python", server.config.python, "--server.port", "0"]
    flags += [
        "--inference.log_file",
        server.config.log_file,
        "--server.shutdown_timeout",
        "0.5",
        "-m",
        str(server.path),
    ]
    command = [sys.executable, "-m", "ramify", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"loading {server.path} with vLLM\n"
        assert process.stdout.readline().startswith(f"serving {server.path} (model@0.0) at http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_ended(read_child_pid(server))


async def test_missing_interpreter_is_reported(launch):
    server = launch("")
    server.config.python = "/nowhere/python"
    with pytest.raises(ProviderError, match=r"inference.python = '/nowhere/python'.*No such file"):
        await server.start()


def test_command_has_the_flags_that_training_needs(launch):
    command = launch(
        "", max_model_len=128, max_running_requests=4, enforce_eager=True, extra_args=["--seed", "1"]
    ).build_command()
    text = " ".join(command)
    for flags in (
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
        "--generation-config vllm",
        "--scheduling-policy priority",
        "--skip-tokenizer-init",  # the model has none
        "--max-model-len 128",
        "--max-num-seqs 4",
        "--enforce-eager",
        "--seed 1",
    ):
        assert flags in text


# -- config -----------------------------------------------------------------------------------------------------------


def test_engine_selects_the_keys():
    assert parse(ServeConfig, ["--inference.max_queued_requests", "3"]).inference == EngineConfig(max_queued_requests=3)
    config = parse(
        ServeConfig, ["--inference.engine", "vllm", "--inference.python", "p", "--inference.extra_args", "-a", "1"]
    )
    assert config.inference == VLLMConfig(python="p", extra_args=["-a", "1"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--inference.engine", "vllm", "--inference.max_queued_requests", "3"],
            "inference.max_queued_requests: unknown key; .* 'vllm' has",
        ),
        (["--inference.python", "p"], "inference.python: unknown key; it needs inference.engine = 'vllm'"),
        (["--inference.engine", "vlm"], "inference.engine: expected 'native' or 'vllm', got 'vlm'"),
        (["--inference.engine", "vllm", "--server.timeout", "3"], "server.timeout needs inference.engine = 'native'"),
        (["--inference.engine", "vllm", "--renderer.tool_format", "hermes"], "renderer needs"),
    ],
)
def test_keys_of_the_other_engine_are_rejected(args, message):
    with pytest.raises(ConfigInvalid, match=message):
        parse(ServeConfig, args)
