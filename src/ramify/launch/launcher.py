"""The interface of a launcher, which starts the processes of a run on the nodes of a cluster.

    launcher.open_slots(leases, placement)  ->  one slot per rank: a node, its host, a free port, a directory
    slot.start(start, log)  ->  the process runs; its output is appended to the log on the head
    slot.wait()  ->  its exit code, when its whole process tree is gone

Commands and config files contain addresses, and an address is known only when the process has a place. So a slot is
opened first, and the command is built for it. Run directories are on the disk of the head, so config files are sent
along and written on the node. `LocalLauncher` starts processes on this machine, `RayLauncher` on the nodes of Ray.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import LeaseTerms, RoleLeases


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster. Sizes are in bytes; None if they are unknown."""

    name: str
    """Unique in the cluster."""
    host: str
    """Address at which the other nodes reach it."""
    num_cpus: float
    num_gpus: float = 0.0
    memory: int | None = None
    gpu_memory: int | None = None
    """Memory of each GPU."""
    is_head: bool = False
    """Whether it is the head, which runs the supervisor, the orchestrator and the ledger."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a process needs of its node; each rank of a gang needs as much."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    choose_nodes: Callable[[Sequence[ClusterNode]], Sequence[str]] | None = None
    """Returns the name of the node of each rank, of those that can be reached, or nothing if there is no room. None:
    each rank goes wherever there is room."""
    lease: LeaseTerms = LeaseTerms()  # noqa: RUF009 - it is immutable
    """How long the process may run while its node cannot be reached."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """What a slot starts."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables in addition to those of the launcher on that node."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text by file name; written to the directory of the slot before the start."""
    address: str = ""
    """Address at which the process answers when it is ready; empty for none."""
    releases_port: bool = False
    """Whether the process cannot bind a port that is still held for it (SO_REUSEPORT), so that it is released first."""
    preload_modules: tuple[str, ...] = ()
    """Modules that take long to import; the process may be forked from one that has imported them."""


class ProcessSlot(Protocol):
    """The place of one execution of a process. Call `start` once, and `stop` in any case."""

    @property
    def node(self) -> str:
        """Name of the node; empty for a process without a placement, which is on the head."""
        ...

    @property
    def host(self) -> str:
        """Address at which other nodes reach the process."""
        ...

    @property
    def port(self) -> int:
        """A port that is free on the node and held for the process; 0 for a process without a placement."""
        ...

    @property
    def directory(self) -> Path:
        """Directory on the node for the files of the process; it is removed by `stop`."""
        ...

    @property
    def pid(self) -> int:
        """Process id on the node; 0 until it is known."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the node was not reachable until the process was dead for certain; `wait` has then returned."""
        ...

    @property
    def has_exited(self) -> bool:
        """Whether certainly no process runs in the slot: none was started, its exit was seen, or it is lost."""
        ...

    @property
    def unreachable_seconds(self) -> float:
        """Seconds since the node answered last, if it has missed an answer; else 0."""
        ...

    async def start(self, start: ProcessStart, log: ProcessLog) -> None:
        """Write the files and start the process. Raises ProcessDied, DeadlineExceeded or a storage failure."""
        ...

    def poll(self) -> int | None:
        """Return the exit code if the process and its descendants have exited, else None."""
        ...

    async def wait(self) -> int:
        """Wait until the process and its descendants have exited, and return the exit code."""
        ...

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs; before it has started, as soon as it has."""
        ...

    def request_stop(self) -> None:
        """Let the process be stopped with all its descendants: by SIGTERM, and by SIGKILL if that does not help."""
        ...

    async def kill(self) -> None:
        """Kill the process and all its descendants, also if they are stopped."""
        ...

    async def stop(self) -> int | None:
        """Stop the process, release the slot, and return the exit code; None if it was never started.

        Returns within seconds. A process on a node that cannot be reached may then run until its lease ends:
        `has_exited` stays False.
        """
        ...


class Launcher(Protocol):
    """Starts processes on nodes."""

    def list_nodes(self) -> list[ClusterNode]:
        """Return the nodes that can be reached."""
        ...

    async def open_slots(
        self, leases: RoleLeases, placement: Placement | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        """Return one slot per rank of the role. Without a placement it is on the head, at an address of its own choice.

        Raises DeadlineExceeded if the cluster has no room within `timeout` seconds.
        """
        ...

    async def close(self) -> None:
        """Release what the launcher holds. All slots must have been stopped."""
        ...
