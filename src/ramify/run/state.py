"""What is known of a run besides its ledger: one typed value, of parts that each have one writer.

    supervisor.json     SupervisorState     the supervisor: the run's address, its processes, their nodes and tokens
    orchestrator.json   OrchestratorState   the orchestrator: progress, waits, and the metrics of the last step

The orchestrator answers `GET /status` with its part, and writes it every few seconds, because a process that is stopped
or hangs does not answer, and holds the lock of the database. A file may be old: what counts (committed steps, whether
the run is finished, the term of its head) is in the ledger. `ramify.run.reader` reads the parts of any run.
"""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from ramify import __version__
from ramify.core.errors import StorageFailed
from ramify.core.files import read_bytes, write_atomically


class ProcessState(StrEnum):
    """The state of a process."""

    WAITING = "waiting"  # for its first start, or its next one
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # it no longer answers
    ENDED = "ended"


class RunPhase(StrEnum):
    """What the orchestrator of a run does: STARTING -> RUNNING -> EVALUATING -> FINISHED; LEAVING once it has to stop.

    `docs/scaling.md` explains the phases to users.
    """

    STARTING = "starting"
    RUNNING = "running"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    LEAVING = "leaving"


class ProcessStatus(msgspec.Struct, frozen=True):
    """The current status of a process."""

    name: str
    state: ProcessState
    pid: int = 0
    restarts: int = 0
    seconds: float = 0.0
    """Seconds since its last start or change of state."""
    address: str = ""
    log: str = ""
    node: str = ""
    """Names of the nodes that its ranks run on; empty on the head."""
    token: str = ""
    """Its fencing token; empty for the orchestrator."""
    replacement_delay: float | None = None
    """Seconds after which it is dead for certain if its node cannot be reached; None: it ends with its supervisor."""


class Wait(msgspec.Struct, frozen=True):
    """What a component of the run waits for, since how many seconds, and with which timeout."""

    who: str
    waits_for: str
    since_s: float = 0.0
    deadline_s: float | None = None
    detail: str = ""


class FailureEvent(msgspec.Struct, frozen=True):
    """A failure that the run has survived; `where` is a source, or what else failed."""

    time: float
    where: str
    name: str
    message: str


class EvalMetric(msgspec.Struct, frozen=True):
    """The last value of a metric of an eval."""

    step: int
    value: float | None


class EnvServerStatus(msgspec.Struct, frozen=True):
    """An env server of a source, and its attempts."""

    address: str
    state: str
    in_flight: int
    done: int
    lost: int


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the state of a run. FILE is its name in the run directory."""

    FILE: ClassVar[str]

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """Return the part that was written last; None if there is none that can be read."""
        try:
            return cls.load(run)
        except StorageFailed:
            return None

    @classmethod
    def load(cls, run: Path) -> Self | None:
        """Return the part that was written last; None if there is none. Raises StorageFailed if it cannot be read."""
        try:
            return msgspec.json.decode(read_bytes(run / cls.FILE), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            problem = f"{run / cls.FILE}, which lists the processes of the run, cannot be read: {error}"
            raise StorageFailed(f"{problem}; remove it if none of them is left on a node") from error

    def write(self, run: Path) -> None:
        """Replace the file."""
        write_atomically(run / self.FILE, msgspec.json.format(msgspec.json.encode(self)))


class SupervisorState(StatePart, frozen=True, kw_only=True):
    """The part that the supervisor writes. The file remains when the run ends."""

    FILE: ClassVar[str] = "supervisor.json"

    name: str = ""
    status_address: str = ""  # of the orchestrator; whether it still answers has to be tried
    pid: int = 0
    started: float = 0.0  # Unix seconds
    versions: dict[str, str] = {}
    processes: dict[str, ProcessStatus] = {}

    @classmethod
    def begin(cls, run: Path, status_address: str) -> Self:
        """Return the part of a supervisor, or of an orchestrator without one, that is this process."""
        versions = {"ramify": __version__, "python": platform.python_version()}
        return cls(
            name=run.name, status_address=status_address, pid=os.getpid(), started=time.time(), versions=versions
        )

    def with_processes(self, processes: Sequence[ProcessStatus]) -> Self:
        """Return the part with the current status of each process."""
        return msgspec.structs.replace(self, processes={process.name: process for process in processes})


class OrchestratorState(StatePart, frozen=True, kw_only=True):
    """The part that the orchestrator answers with and writes.

    `reward` is the mean reward of the last step, `trainable` the number of its trainable and of all scored rollouts,
    `groups` the number of groups by state, `failures` the number of failures by name. `env_servers` are by source, and
    `dropped` says why groups were dropped.
    """

    FILE: ClassVar[str] = "orchestrator.json"

    run: str
    step: int
    max_steps: int
    state: RunPhase
    time: float = msgspec.field(default_factory=time.time)
    """Unix seconds at which this was true, by the clock of `host`."""
    host: str = msgspec.field(default_factory=platform.node)
    pid: int = msgspec.field(default_factory=os.getpid)
    committed: int = 0
    incarnation: int = 0
    version: str | None = None
    eta_s: float | None = None
    reward: float | None = None
    is_teacher_reward: bool = False
    reward_history: list[float | None] = []
    rollouts_per_s: float | None = None
    tokens_per_s: float | None = None
    staleness: dict[str, float | None] = {}
    """`mean` and `max`."""
    trainable: tuple[int, int] | None = None
    groups: dict[str, int] = {}
    errors: list[FailureEvent] = []
    failures: dict[str, int] = {}
    evals: dict[str, EvalMetric] = {}
    env_servers: Mapping[str, list[EnvServerStatus]] = {}
    waits: list[Wait] = []
    dropped: str = ""

    @property
    def age(self) -> float:
        """Seconds since this was true."""
        return max(0.0, time.time() - self.time)

    @property
    def is_starting(self) -> bool:
        """Whether the orchestrator was starting."""
        return self.state is RunPhase.STARTING

    @property
    def startup_wait(self) -> str:
        """What a starting orchestrator waits for; "" if it does not start, or has reported no wait."""
        wait = next((wait for wait in self.waits if wait.since_s), None)
        if wait is None or not self.is_starting:
            return ""
        limit = "" if wait.deadline_s is None else f", up to {wait.deadline_s:g} s"
        return f"the orchestrator waits for {wait.waits_for}{limit}"


class RunState(msgspec.Struct, frozen=True):
    """The state of a run; a part is None if nobody has written it since the run was started."""

    supervisor: SupervisorState | None = None
    orchestrator: OrchestratorState | None = None

    @property
    def processes(self) -> list[ProcessStatus]:
        """The status of each process."""
        return [] if self.supervisor is None else list(self.supervisor.processes.values())
