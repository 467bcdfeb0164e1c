"""Launchers on a Ray cluster of three hosts: the contract, and hosts that are lost."""

import json
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.run

LEASE = 8.0  # seconds
TIMEOUT = 120.0  # seconds for a process to start, or to be seen as gone


def test_contract_holds_on_three_hosts(ray_cluster):
    tests = ["tests/launch/test_launcher_contract.py", "-k", "ray", "-q", "-n", "0"]
    python, head = ray_cluster.python, ray_cluster.hosts[0]
    result = head.run(python, "-m", "pytest", *tests, timeout=600, env=ray_cluster.environment())
    print(result.stdout)
    assert result.returncode == 0


class LeasedProcess:
    """A process on host 3, which the head supervises under a short lease."""

    def __init__(self, cluster, tmp_path: Path) -> None:
        self.beats, self.head, node = tmp_path / "beats", cluster.hosts[0], cluster.hosts[2]
        command = (cluster.python, "-m", "tests.cluster.leased_process", node.name, str(LEASE), str(self.beats))
        self.supervisor = self.head.popen(
            *command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        lines = iter(self.supervisor.stdout.readline, "")
        assert "up\n" in lines, "the process does not start"

    def kill_supervisor(self) -> None:
        """Kill the process that supervises it, with -9."""
        pids = self.head.run("pgrep", "-f", "tests.cluster.leased_process").stdout.split()
        self.head.run("kill", "-9", *pids)
        self.supervisor.communicate(timeout=TIMEOUT)

    def wait(self) -> dict:
        """Return what the head saw, and when the process was last alive."""
        output, _ = self.supervisor.communicate(timeout=TIMEOUT)  # of Ray, too
        return {**json.loads(output.splitlines()[-1]), "last_beat": float(self.beats.read_text().splitlines()[-1])}


def test_host_that_is_cut_off_has_no_process_left_when_it_is_given_up(ray_cluster, tmp_path):
    host = ray_cluster.hosts[2]
    process = LeasedProcess(ray_cluster, tmp_path)
    cut_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    host.cut()
    result = process.wait()
    host.heal()
    ray_cluster.restart_node(host)  # Ray does not take back a node that it has declared dead
    print(result, "cut at", cut_at)
    assert result["is_lost"]
    assert LEASE - 2.0 <= result["last_beat"] - cut_at <= LEASE + 1.0
    assert result["last_beat"] < result["seen_at"] <= cut_at + LEASE + 10.0


def test_short_cut_does_no_harm(ray_cluster, tmp_path):
    host = ray_cluster.hosts[2]
    process = LeasedProcess(ray_cluster, tmp_path)
    host.cut()
    time.sleep(3.0)
    host.heal()
    time.sleep(LEASE)
    last_beat = float(process.beats.read_text().splitlines()[-1])
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - last_beat < 1.0
    assert process.supervisor.poll() is None
    process.kill_supervisor()


def test_killed_supervisor_leaves_no_process(ray_cluster, tmp_path):
    process = LeasedProcess(ray_cluster, tmp_path)
    process.kill_supervisor()
    killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    time.sleep(LEASE + 5.0)
    assert float(process.beats.read_text().splitlines()[-1]) <= killed_at + LEASE


def test_killed_host_is_given_up_after_the_lease(ray_cluster, tmp_path):
    host = ray_cluster.hosts[2]
    process = LeasedProcess(ray_cluster, tmp_path)
    killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    host.kill()
    result = process.wait()
    print(result, "killed at", killed_at)
    assert result["is_lost"]
    assert killed_at + LEASE <= result["seen_at"] <= killed_at + LEASE + 10.0
    ray_cluster.restart_node(host)
