"""The quickstart on three hosts: the head; engine, env servers and a trainer rank; the other trainer rank."""

import json
import subprocess
import time
from pathlib import Path

import pytest

RUN_TIMEOUT = 1500.0  # seconds
EVAL_METRIC = "eval/held-out/avg"
MIN_GAIN = 0.4  # of the mean reward of the eval


class ClusterRun:
    """`ramify rl --cluster ray` on the hosts of a cluster; the head is the first one."""

    def __init__(self, cluster, name: str, **settings: object) -> None:
        self.cluster, self.head = cluster, cluster.hosts[0]
        directory = cluster.hosts.directory
        (directory / "shared").mkdir(exist_ok=True)
        self.path: Path = directory / "head" / name
        keys = {
            "name": name,
            "output": directory / "head",
            "cluster.launcher": "ray",
            "cluster.num_nodes": 3,
            "cluster.shared_directory": directory / "shared",
            "cluster.engines.nodes": '["host2"]',
            "cluster.engines.cores": 1,
            "cluster.env_servers.nodes": '["host2"]',
            "cluster.env_servers.per_source": 1,
            "cluster.trainer.nodes": '["host2", "host3"]',
            "cluster.trainer.cores": 1,
            "cluster.trainer.num_ranks": 2,
            "cluster.trainer.max_per_node": 1,
            **settings,
        }
        self.flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the run, or continue it."""
        command = (self.cluster.python, "-m", "ramify", "rl", "@", "examples/reverse_text/rl.toml", *self.flags)
        with self.path.with_suffix(".out").open("a") as output:
            self.process = self.head.popen(
                *command, env=self.cluster.environment(), stdout=output, stderr=subprocess.STDOUT
            )

    def ramify(self, *arguments: str) -> str:
        """Return what a command prints on the head."""
        command = (self.cluster.python, "-m", "ramify", *arguments)
        return self.head.run(*command, env=self.cluster.environment(), timeout=120).stdout

    def read_record(self) -> dict:
        """Return `run.json`; an empty dict before it exists."""
        path = self.path / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for_step(self, step: int) -> None:
        """Wait until a step was trained."""
        deadline = time.monotonic() + RUN_TIMEOUT
        while f"step={step} " not in self.read_log("trainer"):
            assert self.process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, f"step {step} is not reached"
            time.sleep(0.5)

    def read_log(self, name: str) -> str:
        path = self.path / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def finish(self) -> None:
        """Wait for the end of the run, and check that it finished with a clean ledger."""
        assert self.process.wait(RUN_TIMEOUT) == 0
        audit = self.ramify("why", str(self.path), "--audit")
        print(audit)
        assert "no problems" in audit


@pytest.fixture
def build_run(ray_cluster):
    (ray_cluster.hosts.directory / "head").mkdir(exist_ok=True)
    runs = []

    def build(name: str, **settings: object) -> ClusterRun:
        runs.append(ClusterRun(ray_cluster, name, **settings))
        return runs[-1]

    yield build
    for run in runs:
        print(run.path.with_suffix(".out").read_text()[-5000:])
        if run.process is not None and run.process.poll() is None:
            run.head.run("pkill", "-9", "-f", "ramify rl")  # in the process namespace of the host
            run.process.wait(60)


def test_quickstart_learns_on_three_hosts(build_run):
    run = build_run("quickstart")
    run.start()
    run.finish()
    processes = run.read_record()["processes"]
    assert processes["trainer"]["node"] == "host2, host3"
    assert processes["inference/0"]["node"] == "host2"
    assert processes["orchestrator"]["node"] == ""
    assert "forest" in run.read_log("trainer")
    assert (run.path / "logs" / "trainer-1.log").exists()
    points = json.loads(run.ramify("metrics", str(run.path), "--name", EVAL_METRIC, "--json"))
    means = [point["value"] for point in points]
    print(means)
    assert means[-1] - means[0] >= MIN_GAIN


@pytest.mark.parametrize(("number", "lost"), [(2, ["inference/0", "env/train/reverse/0", "trainer"]), (3, ["trainer"])])
def test_processes_of_a_killed_host_are_replaced_and_the_run_goes_on(build_run, ray_cluster, number, lost):
    host = ray_cluster.hosts[number - 1]
    run = build_run(f"killed-host{number}", max_steps=20, **{"cluster.lease_duration": 10})
    run.start()
    run.wait_for_step(11)  # one checkpoint is committed
    host.kill()
    ray_cluster.restart_node(host)
    run.finish()
    processes = run.read_record()["processes"]
    assert {name for name, process in processes.items() if process["restarts"]} >= set(lost)
    assert f"trainer is lost: its node {host.name}" in run.read_log("launch")
