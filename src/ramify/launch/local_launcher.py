"""Starts processes on this machine, as children of this process."""

import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ramify.launch.devices import list_visible_gpus
from ramify.launch.launcher import ClusterNode, Placement, ProcessSlot, ProcessStart
from ramify.launch.machine import count_usable_cores, get_usable_memory
from ramify.launch.ports import HOST, PortReservation
from ramify.launch.slot_directory import SlotDirectory
from ramify.processes.child import STOP_TIMEOUT, ChildProcess
from ramify.processes.log import ProcessLog
from ramify.processes.prefork import PreforkClient
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE
from ramify.run.fencing.lease import RoleLeases
from ramify.run.store import storage_call


class LocalLauncher:
    """Starts processes on this machine; those that preload modules are forked from the server of `prefork_client`.

    A process that is stopped gets SIGKILL `stop_timeout` seconds after SIGTERM.
    """

    def __init__(self, *, prefork_client: PreforkClient | None = None, stop_timeout: float = STOP_TIMEOUT) -> None:
        self._prefork_client, self._stop_timeout = prefork_client, stop_timeout

    def list_nodes(self) -> list[ClusterNode]:
        """Return this machine."""
        gpus = list_visible_gpus()
        gpu_memory = min((gpu.memory for gpu in gpus if gpu.memory is not None), default=None)
        return [
            ClusterNode(
                socket.gethostname(),
                HOST,
                num_cpus=count_usable_cores(),
                num_gpus=len(gpus),
                memory=get_usable_memory(),
                gpu_memory=gpu_memory,
                is_head=True,
            )
        ]

    async def open_slots(
        self, leases: RoleLeases, placement: Placement | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        """Return one slot per rank. This machine runs whatever it is given, so `timeout` is not needed."""
        return [
            LocalSlot(
                has_port=placement is not None, prefork_client=self._prefork_client, stop_timeout=self._stop_timeout
            )
            for _ in range(leases.num_ranks)
        ]

    async def close(self) -> None:
        """Do nothing: the fork server belongs to the caller."""


class LocalSlot:
    """The place of one execution of a process on this machine."""

    node = ""
    is_lost = False
    unreachable_seconds = 0.0

    def __init__(
        self,
        *,
        host: str = HOST,
        has_port: bool = False,
        prefork_client: PreforkClient | None = None,
        is_detached: bool = False,
        stop_timeout: float = STOP_TIMEOUT,
    ) -> None:
        """Reserve a port at `host` if the process needs one; `ChildProcess` gets the other options."""
        self.host, self._prefork_client = host, prefork_client
        self._is_detached, self._stop_timeout = is_detached, stop_timeout
        self._reservation = PortReservation({"port": f"tcp://{host}:0"} if has_port else {})
        self.port = urlsplit(self._reservation.addresses["port"]).port or 0 if has_port else 0
        self._directory: SlotDirectory | None = None
        self._child: ChildProcess | None = None
        self._pending_signal: signal.Signals | None = None
        self._lease_end: float | None = None

    @property
    def directory(self) -> Path:
        """A temporary directory, which is created on first use."""
        if self._directory is None:
            self._directory = SlotDirectory()
        return self._directory.path

    @property
    def has_exited(self) -> bool:
        """Whether no process runs in the slot."""
        return self._child is None or self._child.has_exited

    @property
    def pid(self) -> int:
        """Process id; 0 until it is known."""
        return self._child.pid if self._child is not None else 0

    async def start(self, start: ProcessStart, log: ProcessLog) -> None:
        """Write the files and start the process, forked from the fork server if that is possible."""
        for name, text in start.files.items():
            path = self.directory / name
            with storage_call(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        if start.releases_port:
            self._reservation.close()
        ports = {RESERVED_PORTS_VARIABLE: str(self.port)} if self.port and not start.releases_port else {}
        child = self._child = ChildProcess(
            start.command,
            env={**start.env, **ports},
            stop_timeout=self._stop_timeout,
            is_detached=self._is_detached,
        )
        if self._lease_end is not None:
            child.set_lease_end(self._lease_end)
        if self._pending_signal is not None:
            child.send_signal(self._pending_signal)
        client = self._prefork_client
        with storage_call(log.path):
            output = log.open()
        with output:
            if client is None or not await child.start_preforked(client, start.preload_modules, output.fileno()):
                await child.start(output.fileno())

    def poll(self) -> int | None:
        """Return the exit code if the process and its descendants have exited, else None."""
        return self._child.poll() if self._child is not None else None

    async def wait(self) -> int:
        """Wait until the process and its descendants have exited, and return the exit code."""
        assert self._child is not None, "the process was not started"
        return await self._child.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs; before it has started, as soon as it has."""
        if self._child is None:
            self._pending_signal = number
        else:
            self._child.send_signal(number)

    def set_lease_end(self, lease_end: float) -> None:
        """Let the watcher kill the process and its descendants at this time of the lease clock."""
        self._lease_end = lease_end
        if self._child is not None:
            self._child.set_lease_end(lease_end)

    def request_stop(self) -> None:
        """Let the watcher stop the process."""
        if self._child is not None:
            self._child.request_stop()

    async def kill(self) -> None:
        """Kill the process; its watcher kills the descendants."""
        if self._child is not None:
            await self._child.kill()

    async def stop(self) -> int | None:
        """Stop the process and release port and directory."""
        try:
            return await self._child.stop() if self._child is not None else None
        finally:
            self._reservation.close()
            if self._directory is not None:
                self._directory.remove()
                self._directory = None
