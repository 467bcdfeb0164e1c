"""Hosts for cluster tests: network namespaces on one bridge, each with its own processes, host name and Ray directory.

    with Hosts(3) as hosts:
        hosts[0].run("ip", "addr")        # in the first host, as an ordinary child process
        hosts[1].cut(), hosts[1].heal()   # off the network without a FIN or RST, and back
        hosts[2].kill()                   # every process of the host at once, as if its plug were pulled

Hosts share the file system, except the directory of Ray and /dev/shm. Root is needed. All names start with a prefix of
this network, and everything is removed at the end.
"""

import contextlib
import itertools
import os
import shutil
import string
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

START_TIMEOUT = 20.0  # seconds for a host to be up
_letters = itertools.cycle(string.ascii_lowercase)  # tell the networks of one process apart
# The first process of a host: it collects orphans as an init process does, and dies with its parent.
INIT = """
set -e
hostname "$1"
mount --bind "$2" "$3"
mount -t tmpfs -o size=400m tmpfs /dev/shm
touch "$2/up"
while true; do sleep 3600 & wait $!; done
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Host:
    """One host. `name` is its host name, `address` its address in the network of all hosts."""

    def __init__(self, hosts: "Hosts", number: int) -> None:
        self.hosts, self.number = hosts, number
        self.name, self.address = f"host{number}", f"10.78.0.{number}"
        self.namespace, self.port = f"{hosts.prefix}{number}", f"p{number}"
        self._own_directory = hosts.directory / self.name
        self._process: subprocess.Popen[bytes] | None = None

    def create_network(self) -> None:
        ip("netns", "add", self.namespace)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            self.namespace,
            "type",
            "veth",
            "peer",
            "name",
            self.port,
            "netns",
            self.hosts.switch,
        )
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            ip("-n", self.namespace, "link", "set", interface, "up")
        ip("-n", self.hosts.switch, "link", "set", self.port, "master", "bridge")
        ip("-n", self.hosts.switch, "link", "set", self.port, "up")

    def start(self) -> None:
        """Boot the host, with an empty Ray directory."""
        shutil.rmtree(self._own_directory, ignore_errors=True)
        self._own_directory.mkdir()
        isolate = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        init = ("sh", "-c", INIT, "init", self.name, str(self._own_directory), str(self.hosts.ray_directory))
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.namespace}", *isolate, *init], start_new_session=True
        )
        deadline = time.monotonic() + START_TIMEOUT
        while not (self._own_directory / "up").exists():
            assert time.monotonic() < deadline and self._process.poll() is None, f"{self.name} does not start"
            time.sleep(0.02)

    def command(self, *command: str) -> list[str]:
        """Return a command that runs `command` in this host."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        namespaces = ("--net", "--mount", "--uts", "--pid", f"--wd={Path.cwd()}")
        return ["nsenter", "--target", children[0], *namespaces, *command]

    def popen(self, *command: str, **options) -> subprocess.Popen:
        """Start a command in this host."""
        return subprocess.Popen(self.command(*command), **options)

    def run(self, *command: str, timeout: float = 60.0, **options) -> subprocess.CompletedProcess:
        """Run a command in this host; its output is captured."""
        return subprocess.run(
            self.command(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            **options,
        )

    def cut(self) -> None:
        """Take the host off the network."""
        ip("-n", self.hosts.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Put the host back on the network."""
        ip("-n", self.hosts.switch, "link", "set", self.port, "up")

    def kill(self) -> None:
        """Kill all processes of the host."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


class Hosts:
    """Several hosts on one network. `directory` is seen by all of them, and removed at the end."""

    def __init__(self, number: int) -> None:
        self.prefix = f"rfy{os.getpid()}{next(_letters)}"
        self.switch = f"{self.prefix}s"
        self.directory = Path(tempfile.mkdtemp(prefix="rfy"))  # short: Ray puts sockets into it
        self.ray_directory = self.directory / "ray"
        self.ray_directory.mkdir()
        self._hosts = [Host(self, index + 1) for index in range(number)]

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Self:
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            for interface in ("bridge", "lo"):
                ip("-n", self.switch, "link", "set", interface, "up")
            for host in self._hosts:
                host.create_network()
                host.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all hosts, and remove their networks and files."""
        for host in self._hosts:
            host.kill()
        for name in [host.namespace for host in self._hosts] + [self.switch]:
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)
        shutil.rmtree(self.directory, ignore_errors=True)
