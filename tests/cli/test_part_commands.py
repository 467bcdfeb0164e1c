"""The part commands read the config file of a whole run and take their part of it."""

import socket
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.core.config import parse, parse_component
from ramify.infer.config import ExternalServersConfig, ServeConfig
from ramify.launch.machine import Gpu
from ramify.launch.process_configs import (
    build_env_server_config,
    build_serve_config,
    build_source_addresses,
    build_trainer_config,
)
from ramify.orchestrate.run_config import RunConfig
from ramify.rollout.envserver.config import EnvServerConfig, StaticPoolConfig
from ramify.train.config import TrainerProcessConfig
from tests.support.plans import open_place, plan_here

RUN = """
name = "whole"
max_steps = 7
seq_len = 300
seed = 5

[inference]
max_running_requests = 8

[trainer.optim]
lr = 0.5

[orchestrator]
address = "tcp://127.0.0.1:5100"

[checkpoint]
interval = 3

[[train]]
name = "one"
taskset = { id = "reverse-text" }
pool = { type = "static", workers = 3 }

[[train]]
name = "two"
taskset = { id = "reverse-text", seed = 1 }
endpoint = { base_url = "http://127.0.0.1:9", model = "other" }
weight = 3

[[eval]]
name = "one"
taskset = { id = "reverse-text", split = "eval" }
"""
ELSEWHERE = "192.0.2.1"  # reserved for documentation: no machine has it


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAMIFY_SECRET", raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    return "run.toml"


@pytest.mark.process
def test_serve_takes_model_and_length_of_the_run(file):
    config, run_config = parse_component(ServeConfig, ["@", file, "--server.port", "81"], RunConfig, build_serve_config)
    assert (config.inference.max_running_requests, config.inference.max_model_len) == (8, 300)
    assert (config.server.port, config.server.model_name) == (81, "tiny")
    assert run_config == parse(RunConfig, ["@", file])


@pytest.mark.process
def test_serve_listens_at_the_base_url_of_the_run(file, capsys):
    outside = ["@", file, "--inference.engine", "vllm"]
    run = parse(RunConfig, ["@", file, '--inference={"engine": "external", "base_url": ["http://127.0.0.2:8123"]}'])
    assert build_serve_config(run)["server"] == {"model_name": "tiny", "host": "127.0.0.2", "port": 8123}
    # flags are keys of the part
    assert main(["serve", *outside, "--inference.max_running_requests", "2", "--dry-run"]) == 0
    assert "max_running_requests" not in capsys.readouterr().err
    several = RUN.replace("max_running_requests = 8", 'engine = "external"\nbase_url = ["http://a:1", "http://b:2"]')
    Path("run.toml").write_text(several)
    assert main(["serve", "@", file, "--dry-run"]) == 2
    assert "server: the run lists several engines (http://a:1, http://b:2)" in capsys.readouterr().err
    assert main(["serve", "@", file, "--server.host", "b", "--server.port", "2", "--dry-run"]) == 0
    assert "at http://b:2" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize("table", ["", 'dtype = "float32"', 'dtype = "bfloat16"', 'device = "cpu"'])
@pytest.mark.parametrize("gpus", [[], [Gpu("0", 80 << 30)]], ids=["cpu", "gpu"])
def test_serve_uses_the_dtype_of_a_single_machine_run(file, gpus, table, monkeypatch):
    """With the dtype of the checkpoint, engine and trainer once computed in different types."""
    monkeypatch.setattr("ramify.launch.process_configs.list_visible_gpus", lambda: gpus)
    any_port = RUN.replace(":5100", ":0")  # the plan reserves its ports
    Path("run.toml").write_text(f"{any_port}[trainer]\n{table}\n")
    run = parse(RunConfig, ["@", file])
    planned = open_place(plan_here(run, len(gpus)), "inference/0")[2]["inference"]["dtype"]
    outside = run.model_copy(update={"inference": ExternalServersConfig(base_url=["http://127.0.0.2:8123"])})
    assert {build_serve_config(config)["inference"]["dtype"] for config in (run, outside)} == {planned}
    mine, _ = parse_component(ServeConfig, ["@", file, "--inference.dtype", "bfloat16"], RunConfig, build_serve_config)
    assert mine.inference.dtype == "bfloat16"


def test_trainer_takes_path_and_address_of_the_run(file, capsys):
    config, _ = parse_component(TrainerProcessConfig, ["@", file], RunConfig, build_trainer_config)
    assert (str(config.path), config.address, config.seed) == ("outputs/whole", "tcp://127.0.0.1:5100", 5)
    assert (config.trainer.optim.lr, config.checkpoint.interval) == (0.5, 3)
    assert main(["trainer", "@", file, "--dry-run"]) == 0
    assert "on tcp://127.0.0.1:5100, into outputs/whole" in capsys.readouterr().out
    Path("run.toml").write_text(RUN.replace(":5100", ":0"))
    assert main(["trainer", "@", file, "--dry-run"]) == 2
    assert "as orchestrator.address" in capsys.readouterr().err
    assert main(["trainer", "@", file, "--replay", "batches", "--dry-run"]) == 0


def test_env_server_takes_one_source_with_the_limits_of_the_run(file, capsys):
    words = ["@", file, "--source", "train/one", "--inference.base_url", "http://127.0.0.1:8"]
    config, _ = parse_component(
        EnvServerConfig, words, RunConfig, lambda run_config: build_env_server_config(run_config, "train/one")
    )
    picked = config.select_source()
    assert (picked.key, picked.config.seq_len, picked.config.address) == ("train/one", 300, "tcp://127.0.0.1:0")
    assert picked.config.pool == StaticPoolConfig(workers=3)
    assert config.inference == ExternalServersConfig(engine="external", base_url=["http://127.0.0.1:8"])
    assert str(picked.log_path(config.output)) == "outputs/whole/logs/env/train/one.log"
    assert config.secret_env is None
    assert main(["env-server", "@", file, "--source", "train/one", "--dry-run"]) == 2
    assert "give its address with -b URL" in capsys.readouterr().err
    assert main(["env-server", "@", file, "--dry-run", "-b", "http://127.0.0.1:8"]) == 2
    assert "source: there are several sources; select one of train/one, train/two, eval/one" in capsys.readouterr().err


def test_source_with_its_own_endpoint_uses_it(file):
    table = build_env_server_config(parse(RunConfig, ["@", file]), "train/two")
    assert (table["inference"], table["model"]) == ({"base_url": ["http://127.0.0.1:9"]}, {"name": "other"})


def test_secret_of_the_run_is_used(file, monkeypatch):
    monkeypatch.setenv("RAMIFY_SECRET", "x")
    run = parse(RunConfig, ["@", file])
    assert (run.secret, build_env_server_config(run, "train/one")["secret_env"]) == ("x", "RAMIFY_SECRET")


def test_public_address_requires_a_secret(file, monkeypatch, capsys):
    words = ["env-server", "@", file, "--source", "train/two", "--train.1.address", "tcp://0.0.0.0:0", "--dry-run"]
    assert main(words) == 2
    assert "set a secret in the environment variable that secret_env names" in capsys.readouterr().err
    monkeypatch.setenv("RAMIFY_SECRET", "x")
    assert main(words) == 0


def test_ports_depend_only_on_base_port(file):
    run = parse(RunConfig, ["@", file, "--launch.base_port", "7000"])
    fixed = {"train/one": "tcp://127.0.0.1:7000", "train/two": "tcp://127.0.0.1:7001"}
    assert build_source_addresses(run) == {**fixed, "eval/one": "tcp://127.0.0.1:8000"}
    assert build_env_server_config(run, "train/two")["train"][1]["address"] == "tcp://127.0.0.1:7001"
    assert set(build_source_addresses(parse(RunConfig, ["@", file])).values()) == {"tcp://127.0.0.1:0"}


def test_port_in_use_is_a_named_failure_of_every_part(file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["-b", "http://127.0.0.1:9", "--orchestrator.address", f"tcp://127.0.0.1:{port}"]
        assert main(["orchestrator", "@", file, *words]) == 1
    assert f"PortTaken: orchestrator.address: tcp://127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err


def test_address_of_another_machine_is_not_checked(file, monkeypatch, capsys):
    monkeypatch.setenv("RAMIFY_SECRET", "x")
    message = f"tcp://{ELSEWHERE}:5100 cannot be listened on: {ELSEWHERE} is not an address of this machine"
    words = ["-b", "http://127.0.0.1:9", "--orchestrator.address", f"tcp://{ELSEWHERE}:5100"]
    assert main(["orchestrator", "@", file, *words]) == 2
    assert f"orchestrator.address: {message}" in capsys.readouterr().err
    words = ["--source", "train/two", "--train.1.address", f"tcp://{ELSEWHERE}:5100"]
    assert main(["env-server", "@", file, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "trainer", "env-server", "orchestrator"])
def test_unknown_key_suggests_the_nearest_in_file_and_flags(file, capsys, command):
    Path("run.toml").write_text(RUN.replace("seq_len", "seq_length"))
    assert main([command, "@", file]) == 2
    assert "seq_length: unknown key; did you mean seq_len? (run.toml)" in capsys.readouterr().err
    Path("run.toml").write_text(RUN.replace("interval = 3", "intervall = 3"))
    assert main([command, "@", file]) == 2
    assert "checkpoint.intervall: unknown key; did you mean checkpoint.interval?" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "flag", "nearest"),
    [
        ("serve", "--server.prt", "server.port"),
        ("trainer", "--orchestrator_timeot", "orchestrator_timeout"),
        ("env-server", "--hang_timeot", "hang_timeout"),
    ],
)
def test_flags_are_keys_of_the_part(file, capsys, command, flag, nearest):
    source = ["--source", "train/two"] if command == "env-server" else []
    assert main([command, "@", file, *source, flag, "3"]) == 2
    assert f"unknown flag {flag}; did you mean --{nearest}?" in capsys.readouterr().err
