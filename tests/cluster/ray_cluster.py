"""Ray on namespace hosts, of which one is the head: the first, until another is chosen.

RAMIFY_RAY_PYTHON names the interpreter of an environment with Ramify, its extra `ray` and pytest.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Host, Hosts

START_TIMEOUT = 240.0  # seconds; a node of Ray starts several Python processes
START_ATTEMPTS = 3
STOP_TIMEOUT = 120.0  # seconds
RAY_PORT = 6379
# Fixed ports: otherwise Ray waits for files in which its agents report theirs, and times out on a busy machine.
PORTS = {
    "min-worker-port": 20000,
    "max-worker-port": 20999,
    "dashboard-agent-grpc-port": 7001,
    "dashboard-agent-listen-port": 7002,
    "runtime-env-agent-port": 7003,
    "metrics-export-port": 7004,
    "node-manager-port": 7005,
    "object-manager-port": 7006,
}
ENVIRONMENT = {
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A Ray cluster on hosts. Nodes are started one at a time: starts at once fail on a busy machine."""

    def __init__(self, hosts: Hosts, *, num_cpus: int = 4) -> None:
        self.hosts, self.num_cpus, self.head = hosts, num_cpus, hosts[0]
        self.python = os.environ["RAMIFY_RAY_PYTHON"]

    @property
    def address(self) -> str:
        """The address of the head."""
        return f"{self.head.address}:{RAY_PORT}"

    def start(self) -> None:
        """Start Ray on all hosts."""
        self.start_nodes([self.hosts[number] for number in range(len(self.hosts))])

    def start_nodes(self, hosts: Sequence[Host]) -> None:
        """Start Ray on these hosts, of which the first becomes the head."""
        self.head = hosts[0]
        for host in hosts:
            self.start_node(host)

    def start_node(self, host: Host) -> None:
        """Start Ray on one host."""
        is_head = host is self.head
        role = ["--head", f"--port={RAY_PORT}", f"--temp-dir={self.hosts.ray_directory}", "--include-dashboard=false"]
        options = [f"--{name}={port}" for name, port in PORTS.items()]
        command = [
            str(Path(self.python).with_name("ray")),
            "start",
            *(role if is_head else [f"--address={self.address}"]),
            f"--node-ip-address={host.address}",
            f"--node-name={host.name}",
            f"--num-cpus={self.num_cpus}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            *options,
        ]
        for _ in range(START_ATTEMPTS):
            result = host.run(*command, timeout=START_TIMEOUT, env={**os.environ, **ENVIRONMENT})
            if result.returncode == 0:
                return
            host.kill()
            host.start()
        raise AssertionError(f"Ray does not start on {host.name}:\n{result.stdout}")

    def is_running(self, host: Host) -> bool:
        """Return whether Ray runs on a host. It ends itself on a node that its head has declared dead."""
        return host.run("pgrep", "-x", "raylet").returncode == 0

    def stop_node(self, host: Host) -> None:
        """End the processes of Ray on a host; others run on."""
        host.run(str(Path(self.python).with_name("ray")), "stop", "--force", timeout=STOP_TIMEOUT)

    def restart_node(self, host: Host) -> None:
        """Boot a host again, and start Ray on it."""
        host.kill()
        host.start()
        self.start_node(host)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a program that uses the cluster."""
        return {**os.environ, **ENVIRONMENT, "RAMIFY_RAY": self.address}
