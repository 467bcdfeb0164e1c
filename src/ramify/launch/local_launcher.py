"""Starts processes on this machine, as children of this process: a cluster of one node."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from ramify.launch.launcher import ClusterNode, Place, PlacementRequest, ProcessSlot, ProcessSpec, ProcessStart
from ramify.launch.machine import HOST, Gpu, describe_machine, list_visible_gpus
from ramify.processes.child import STOP_TIMEOUT, ChildProcess
from ramify.processes.log import ProcessLog
from ramify.processes.prefork import PreforkClient, get_import_env, start_prefork_server
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE, PortReservation
from ramify.run.fencing.lease import RoleLeases
from ramify.run.store import storage_call

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
DIRECTORY_PREFIX = "ramify-slot-"
DIRECTORY_LOCK_FILE = ".lock"


class LocalLauncher:
    """Starts processes on this machine. Config files go to `directory` or, without one, to a temporary one.

    A process keeps its port as long as the launcher exists, so that its address is the same after a restart; a gang
    gets new ones, so that its ranks do not meet ranks of the last start. Two or more processes that preload modules are
    forked from a server that has imported them. A process that is stopped gets SIGKILL `stop_timeout` seconds after
    SIGTERM.
    """

    can_lose_nodes = False

    def __init__(self, directory: Path | None = None, *, stop_timeout: float = STOP_TIMEOUT) -> None:
        self._directory, self._stop_timeout = directory, stop_timeout
        self._reservations: dict[str, list[PortReservation]] = {}
        self._prefork_client: PreforkClient | None = None

    @cached_property
    def _gpus(self) -> list[Gpu]:
        return list_visible_gpus()

    def list_nodes(self) -> list[ClusterNode]:
        """Return this machine."""
        return [describe_machine(self._gpus)]

    @contextlib.contextmanager
    def prepare(self, specs: Sequence[ProcessSpec]) -> Generator[None]:
        """Reserve the ports of the processes, and start the fork server. Raises PortTaken for a port in use."""
        for process in specs:
            if process.placement is not None:
                self._reserve_ports(process.name, process.placement, process.num_ranks)
        with contextlib.ExitStack() as stack:
            forkable = [process for process in specs if process.preload_modules]
            import_envs = [get_import_env({**process.env, GPUS_VARIABLE: ""}) for process in forkable]
            if len(forkable) > 1 and all(env == import_envs[0] for env in import_envs):
                server = start_prefork_server(forkable[0].preload_modules, import_envs[0])
                self._prefork_client = stack.enter_context(server)
                stack.callback(setattr, self, "_prefork_client", None)
            yield

    def _reserve_ports(self, role: str, placement: PlacementRequest, num_ranks: int) -> list[PortReservation]:
        if role not in self._reservations or num_ranks > 1:
            address = f"tcp://{HOST}:{placement.port}"
            self._reservations[role] = [PortReservation({role: address}) for _ in range(num_ranks)]
        return self._reservations[role]

    async def open_slots(
        self, leases: RoleLeases, placement: PlacementRequest | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        """Return one slot per rank. This machine runs whatever it is given, so `timeout` is not needed."""
        places: Sequence[Place] = [Place("")] * leases.num_ranks
        reservations: Sequence[PortReservation | None] = [None] * leases.num_ranks
        if placement is not None:
            places = placement.choose_places(self.list_nodes())
            reservations = self._reserve_ports(leases.role, placement, leases.num_ranks)
        return [
            LocalSlot(
                reservation=reservation,
                directory=self._directory,
                gpus=",".join(self._gpus[number].index for number in place.gpus),
                prefork_client=self._prefork_client,
                stop_timeout=self._stop_timeout,
            )
            for place, reservation in zip(places, reservations, strict=True)
        ]


class LocalSlot(ChildProcess):
    """The place of one execution of a process on this machine, and that process.

    `reservation` holds its port, and is closed by its owner. `directory` is for its files; without one, a temporary one
    is created on first use. `gpus` are the GPUs that it sees; None: all that this process sees. `ChildProcess`
    gets the other options.
    """

    node = ""
    is_lost = False
    unreachable_seconds = 0.0

    def __init__(
        self,
        *,
        host: str = HOST,
        reservation: PortReservation | None = None,
        directory: Path | None = None,
        gpus: str | None = None,
        prefork_client: PreforkClient | None = None,
        is_detached: bool = False,
        stop_timeout: float = STOP_TIMEOUT,
    ) -> None:
        super().__init__(stop_timeout=stop_timeout, is_detached=is_detached)
        self.host, self._reservation, self._prefork_client = host, reservation, prefork_client
        address = next(iter(reservation.addresses.values())) if reservation is not None else ""
        self.port = urlsplit(address).port or 0
        self._given_directory, self._gpus = directory, gpus
        self._directory: SlotDirectory | None = None

    @property
    def directory(self) -> Path:
        """The directory for its files."""
        if self._given_directory is not None:
            return self._given_directory
        if self._directory is None:
            self._directory = SlotDirectory()
        return self._directory.path

    async def start(self, start: ProcessStart, log: ProcessLog) -> None:
        """Write the files and start the process, forked from the fork server if that is possible."""
        for name, text in start.files.items():
            path = self.directory / name
            with storage_call(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        env = {**start.env, **({} if self._gpus is None else {GPUS_VARIABLE: self._gpus})}
        if self._reservation is not None:
            if start.releases_port:
                self._reservation.close()
            if ports := self._reservation.format_ports():
                env[RESERVED_PORTS_VARIABLE] = ports
        client, modules, command = self._prefork_client, start.preload_modules, start.command
        with storage_call(log.path):
            output = log.open()
        with output:
            fd = output.fileno()
            if client is None or not await self.spawn_preforked(client, modules, command, fd, env=env):
                await self.spawn(command, fd, env=env)

    async def stop(self) -> int | None:
        """Stop the process, and remove its temporary directory."""
        try:
            return await super().stop()
        finally:
            if self._directory is not None:
                self._directory.remove()
                self._directory = None


class SlotDirectory:
    """The temporary directory of one process, at `path`. Call `remove` once.

    Its owner removes it when the process has ended. An owner that is killed cannot do so: an actor of Ray that was not
    reachable, or a supervisor. Therefore the owner holds a lock in the directory, which the kernel releases however the
    owner ends, and whoever creates the next slot on the node removes the directories without one.
    """

    def __init__(self) -> None:
        temp_root = Path(tempfile.gettempdir())
        with storage_call(temp_root):
            _remove_leftovers(temp_root)
            self.path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=temp_root))
            new_lock = self.path / f"{DIRECTORY_LOCK_FILE}.new"
            self._lock_fd = os.open(new_lock, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            new_lock.rename(self.path / DIRECTORY_LOCK_FILE)  # nobody sees it without its lock

    def remove(self) -> None:
        """Remove the directory with all files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_leftovers(temp_root: Path) -> None:
    for directory in temp_root.glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is new, locked, or belongs to another user
            fd = os.open(directory / DIRECTORY_LOCK_FILE, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(fd)
