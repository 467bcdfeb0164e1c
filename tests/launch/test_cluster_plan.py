"""The plan of a run on a cluster: a process is configured for the place that it gets, with the addresses known then."""

import tomllib
from pathlib import Path

import pytest

from ramify.launch.cluster_plan import ClusterPlan, build_cluster_plan
from ramify.launch.launcher import ClusterNode
from ramify.launch.local_launcher import LocalSlot
from ramify.launch.process import ProcessRole
from ramify.orchestrate.config import RunConfig
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.server import EnvServer

NODES = [
    ClusterNode("head", "127.0.0.1", 4, is_head=True),
    ClusterNode("b", "127.0.0.2", 8),
    ClusterNode("c", "127.0.0.3", 8),
]


@pytest.fixture
def plan(tmp_path):
    """A run with two engines, two env servers of its train source, and two trainer ranks."""
    cluster = {
        "launcher": "ray",
        "shared_directory": str(tmp_path / "shared"),
        "lease_duration": 30,
        "engines": {"num_replicas": 2, "cores": 2},
        "env_servers": {"num_per_source": 2, "cores": 1},
        "trainer": {"num_ranks": 2, "cores": 1, "max_per_node": 1, "nodes": ["b", "c"]},
    }
    source = {"name": "words", "taskset": {"id": "reverse-text"}}
    config = RunConfig(name="run", output=tmp_path, train=[source], eval=[source], cluster=cluster)
    with (plan := build_cluster_plan(config, NODES)).reservation:
        yield plan


def start(plan: ClusterPlan, name: str, host: str):
    """Give a process a place, and return what is started there and its configuration."""
    spec = next(spec for spec in plan.process_specs if spec.name == name)
    slot = LocalSlot(host=host, has_port=True)
    started = spec.build_start(slot)
    (text,) = started.files.values()
    assert started.command[-1] == str(slot.directory / next(iter(started.files)))
    return slot, started, tomllib.loads(text)


def test_processes_have_placements_and_services(plan):
    specs = {spec.name: spec for spec in plan.process_specs}
    assert set(specs) == {
        "orchestrator",
        "trainer",
        "inference/0",
        "inference/1",
        "env/train/words/0",
        "env/train/words/1",
        "env/eval/words/0",
    }
    assert specs["orchestrator"].placement is None
    assert specs["orchestrator"].role is ProcessRole.LEADER
    assert set(specs["orchestrator"].start_after) == set(specs) - {"orchestrator", "trainer"}
    assert specs["trainer"].num_ranks == 2
    assert specs["trainer"].placement.choose_nodes(NODES) == ("b", "c")
    assert specs["trainer"].placement.choose_nodes(NODES[:2]) == ()
    assert specs["trainer"].placement.lease.duration == 30
    assert specs["inference/1"].placement.lease.duration == 60
    assert specs["inference/1"].service == "inference"
    assert specs["env/train/words/1"].service == "env/train/words"
    assert specs["env/train/words/1"].start_after == ("inference/0", "inference/1")


def test_each_process_is_configured_for_its_place(plan, tmp_path, monkeypatch):
    urls = []
    for number, host in enumerate(("127.0.0.2", "127.0.0.3")):
        slot, started, table = start(plan, f"inference/{number}", host)
        assert (table["server"]["host"], table["server"]["port"]) == (host, slot.port)
        assert started.address == f"http://{host}:{slot.port}/health"
        urls.append(f"http://{host}:{slot.port}")
    slot, started, table = start(plan, "env/train/words/0", "127.0.0.2")
    assert table["inference"]["base_url"] == urls
    assert table["train"][0]["address"] == started.address == f"tcp://127.0.0.2:{slot.port}"
    assert started.env[table["secret_env"]]
    monkeypatch.setenv(table["secret_env"], started.env[table["secret_env"]])
    assert EnvServer(EnvServerConfig(**table)).log_path == Path("/dev/stdout")
    assert "CUDA_VISIBLE_DEVICES" not in started.env
    slot, started, table = start(plan, "trainer", "127.0.0.3")
    assert table["address"].startswith("tcp://127.0.0.1:")
    assert table["shared_directory"] == str(tmp_path / "shared" / "run")
    assert started.env["OMP_NUM_THREADS"] == "1"


def test_orchestrator_starts_with_the_addresses_of_the_others(plan):
    names = ("inference/0", "inference/1", "env/train/words/0", "env/train/words/1", "env/eval/words/0")
    addresses = {name: start(plan, name, "127.0.0.2")[1].address.removesuffix("/health") for name in names}
    orchestrator = next(spec for spec in plan.process_specs if spec.name == "orchestrator")
    orchestrator.prepare()
    table = tomllib.loads(Path(orchestrator.command[-1]).read_text())
    assert table["inference"]["base_url"] == [addresses["inference/0"], addresses["inference/1"]]
    assert table["train"][0]["address"] == [addresses["env/train/words/0"], addresses["env/train/words/1"]]
    assert table["eval"][0]["address"] == [addresses["env/eval/words/0"]]
    RunConfig(**table)


def test_plan_is_written_with_who_runs_where(plan, tmp_path):
    plan.config.path.mkdir(parents=True)
    plan.write()
    lines = (tmp_path / "run" / "plan.txt").read_text().splitlines()
    assert "b (127.0.0.2): 0 GPUs, 8 cores" in lines
    assert any(line.startswith("  trainer rank 1: ") for line in lines)
    assert RunConfig(**tomllib.loads((tmp_path / "run" / "config.toml").read_text())) == plan.config
