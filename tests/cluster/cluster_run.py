"""`ramify rl --cluster ray` on namespace hosts: a head; engine, env servers and a trainer rank; another rank."""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Host
from tests.cluster.ray_cluster import RayCluster

RUN_TIMEOUT = 1500.0  # seconds
EXIT_RESUMABLE = 75
EVAL_METRIC = "eval/held-out/avg"
CONFIG = "examples/reverse_text/rl.toml"


class ClusterRun:
    """A run on the hosts of a cluster. Its head is the first host, until `place` chooses another one.

    Every host has a disk of its own in this class: `path` is the run directory on the head's disk.
    """

    def __init__(self, cluster: RayCluster, name: str, **settings: object) -> None:
        self.cluster, self.name, self.settings = cluster, name, settings
        self.shared = cluster.hosts.directory / "shared"
        self.shared.mkdir(exist_ok=True)
        self.process: subprocess.Popen | None = None
        self.place(cluster.hosts[0], [cluster.hosts[1], cluster.hosts[2]])

    def place(self, head: Host, trainer_hosts: Sequence[Host], num_nodes: int = 3) -> None:
        """Choose the head and the hosts of the trainer's ranks; the first of them also has engine and env servers."""
        self.head, self.trainer_hosts, self.num_nodes = head, trainer_hosts, num_nodes
        disk = self.cluster.hosts.directory / f"disk-of-{head.name}"
        disk.mkdir(exist_ok=True)
        self.path: Path = disk / self.name

    @property
    def output(self) -> Path:
        """The file with what the command printed on this head."""
        return self.path.with_suffix(".out")

    def start(self, **settings: object) -> None:
        """Start the run, or continue it."""
        nodes = [host.name for host in self.trainer_hosts]
        keys = {
            "name": self.name,
            "output": self.path.parent,
            "cluster.launcher": "ray",
            "cluster.num_nodes": self.num_nodes,
            "cluster.shared_directory": self.shared,
            "cluster.engines.nodes": json.dumps(nodes[:1]),
            "cluster.engines.cores": 1,
            "cluster.env_servers.nodes": json.dumps(nodes[:1]),
            "cluster.env_servers.num_per_source": 1,
            "cluster.trainer.nodes": json.dumps(nodes),
            "cluster.trainer.cores": 1,
            "cluster.trainer.num_ranks": 2,
            "cluster.trainer.max_per_node": 1,
            **self.settings,
            **settings,
        }
        flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = (self.cluster.python, "-m", "ramify", "rl", "@", CONFIG, *flags)
        with self.output.open("a") as output:
            self.process = self.head.popen(
                *command, env=self.cluster.environment(), stdout=output, stderr=subprocess.STDOUT
            )

    def ramify(self, *arguments: str) -> str:
        """Return what a command prints on the head."""
        command = (self.cluster.python, "-m", "ramify", *arguments)
        return self.head.run(*command, env=self.cluster.environment(), timeout=120).stdout

    def read_record(self) -> dict:
        """Return `supervisor.json`; an empty dict before it exists."""
        path = self.path / "supervisor.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def read_eval_means(self) -> list[float]:
        """Return the mean reward of each eval."""
        points = json.loads(self.ramify("metrics", str(self.path), "--name", EVAL_METRIC, "--json"))
        return [point["value"] for point in points]

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

    def stop(self) -> None:
        """Let the run save a checkpoint and end."""
        self._send_signal("TERM")
        assert self.process.wait(RUN_TIMEOUT) == EXIT_RESUMABLE

    def kill(self) -> None:
        """Kill the command, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self._send_signal("KILL")
            self.process.wait(60)

    def _send_signal(self, name: str) -> None:
        self.head.run("pkill", f"-{name}", "-f", "ramify rl")  # in the process namespace of the host

    def finish(self) -> None:
        """Wait for the end of the run, and check that it finished with a clean ledger."""
        assert self.process.wait(RUN_TIMEOUT) == 0
        audit = self.ramify("why", str(self.path), "--audit")
        print(audit)
        assert "no problems" in audit
