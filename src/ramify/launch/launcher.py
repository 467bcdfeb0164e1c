"""The interface of a launcher, which starts the processes of a run on the nodes of a cluster.

    launcher.open_slots(leases, placement)  ->  one slot per rank: a node, its host, a free port, a directory
    slot.start(start, log)  ->  the process runs; its output is appended to the log on the head
    slot.wait()  ->  its exit code, when its whole process tree is gone

Commands and config files contain addresses, and an address is known only when the process has a place. So a slot is
opened first, and the command is built for it. Run directories are on the disk of the head, so config files are sent
along and written on the node. `LocalLauncher` starts processes on this machine, a cluster of one node; `RayLauncher`
starts them on the nodes of Ray. Nothing else knows which of the two a run has.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import LeaseTerms, RoleLeases

ASSUMED_GPU_BYTES = 80 << 30  # memory of a GPU of unknown size


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster. Sizes are in bytes."""

    name: str
    """Unique in the cluster."""
    host: str
    """Address at which the other nodes reach it."""
    num_cpus: float
    num_gpus: float = 0.0
    memory: int | None = None
    """None if it is unknown."""
    gpu_memory: int = ASSUMED_GPU_BYTES
    """Memory of each GPU."""
    is_head: bool = False
    """Whether it is the head, which runs the supervisor, the orchestrator and the ledger."""
    allows_sharing: bool = False
    """Whether processes may share its cores and GPUs; otherwise the launcher reserves them for one process each."""
    is_assumed: bool = False
    """Whether it is only assumed, for a dry run."""


class Place(NamedTuple):
    """Where a rank runs: the name of its node, and the numbers of its GPUs there."""

    node: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a process needs of its node; each rank of a gang needs as much."""

    choose_places: Callable[[Sequence[ClusterNode]], Sequence[Place]]
    """Chooses a reachable node for each rank. Returns an empty sequence if they do not all fit."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    port: int = 0
    """The port that it listens on; 0: any free one."""
    lease: LeaseTerms = LeaseTerms()  # noqa: RUF009 - it is immutable
    """How long the process may run while its node cannot be reached."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """What a slot starts."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables in addition to the launcher's on that node."""
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


class ProcessRole(Enum):
    """What the exit of a process means for the run."""

    LEADER = "leader"  # the run ends with its exit code
    FOLLOWER = "follower"  # exit code 0: its work is done
    SERVICE = "service"  # it should not exit before the run ends


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start, and how to supervise it."""

    name: str
    """`inference/0`, `env/train/reverse/0`, `orchestrator`, `trainer`."""
    log: Path
    build_start: Callable[[ProcessSlot], ProcessStart]
    """Returns what to start in the slot of each rank; its environment variables are added to `env`. It may write files.
    It is called before each start, in a thread of its own, as is `last_state`."""
    role: ProcessRole = ProcessRole.SERVICE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, added to the supervisor's environment."""
    address: str = ""
    """Address at which it answers when it is ready (`http://...`, `tcp://...`); without one, it is ready at once."""
    ready_timeout: float = 600.0
    """Seconds until it must answer."""
    hang_timeout: float | None = None
    """Seconds without an answer after which a process on the head is killed and restarted. None: never."""
    last_state: Callable[[], str] | None = None
    """Returns its last known state, for the log, when it does not answer."""
    preload_modules: tuple[str, ...] = ()
    """Modules that take long to import; the process may be forked from one that has imported them."""
    service: str = ""
    """Key under which its address is listed in the address book, if it is not always the same; several may share it."""
    num_ranks: int = 1
    """Number of processes that run this command together, as one gang."""
    placement: PlacementRequest | None = None
    """What it needs of the node that it is started on. None: it runs on the head, at the address above."""
    start_after: tuple[str, ...] = ()
    """Names of processes that must have a place, and so an address, before this one is configured and started."""

    @property
    def logs(self) -> tuple[Path, ...]:
        """The log of each rank: `trainer.log`, `trainer-1.log`, `trainer-2.log`."""
        names = (f"{self.log.stem}-{rank}{self.log.suffix}" for rank in range(1, self.num_ranks))
        return (self.log, *(self.log.with_name(name) for name in names))


class Launcher(Protocol):
    """Starts processes on nodes."""

    @property
    def can_lose_nodes(self) -> bool:
        """Whether a process may run on after its supervisor has ended or cannot be reached, until its lease ends."""
        ...

    def list_nodes(self) -> list[ClusterNode]:
        """Return the nodes that can be reached."""
        ...

    def prepare(self, specs: Sequence[ProcessSpec]) -> AbstractContextManager[None]:
        """Reserve what the processes of a run need before the first one starts. Raises PortTaken for a port in use."""
        ...

    async def open_slots(
        self, leases: RoleLeases, placement: PlacementRequest | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        """Return one slot per rank of the role. Without a placement it is on the head, at an address of its own choice.

        Raises DeadlineExceeded if the cluster has no room within `timeout` seconds.
        """
        ...
