"""What is asked of an env server and what it answers; the traces themselves travel as blobs beside these."""

import hashlib
from typing import Any

import msgspec

from ramify.errors import Failure

MAX_COUNTED_TASKS = 100_000  # a taskset with more tasks counts as one without end


class RolloutRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rollout of a task."""

    task: dict[str, Any]
    id: str
    group: str = ""
    attempt: int = 0
    seed: int = 0
    train: bool = False
    sampling: dict[str, Any] | None = None
    """In place of the source's, key by key."""
    attempts: int | None = None
    """How often it is started at most; the source's number unless given."""
    stream: bool = False
    """Whether turns are sent as they are made."""
    start: int = 0
    """The number of its first start: a broker counts on where another worker has stopped."""
    environment: str = ""
    """The digest of the expected environment; a server with another one refuses the request. Empty: not checked."""


class RolloutUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """News of a rollout; the blob is a trace delta. A higher `start` replaces all that came before."""

    start: int
    phase: str


class RolloutResponse(msgspec.Struct, forbid_unknown_fields=True):
    """The end of a rollout; the blob is its encoded episode."""

    worker: str
    starts: int
    crashes: int = 0
    """Workers that were lost under it."""


class TasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A page of tasks."""

    start: int
    count: int


class TaskItem(msgspec.Struct, forbid_unknown_fields=True):
    """A task and what it is called."""

    identity: str
    task: dict[str, Any]


class TaskPage(msgspec.Struct, forbid_unknown_fields=True):
    """Tasks in their order; `end` says that there are no more."""

    tasks: list[TaskItem]
    end: bool


class ScoreGroupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """All attempts at a task, to be compared; the blobs are their traces."""

    task: dict[str, Any]
    environment: str = ""


class GroupScores(msgspec.Struct, forbid_unknown_fields=True):
    """What each trace got: the rewards of the group, and what went wrong."""

    rewards: list[dict[str, tuple[float, float] | None]]
    errors: list[list[Failure]]


class CancelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Rollouts that nobody wants any more, by id."""

    ids: list[str]


class TaskCount(msgspec.Struct, forbid_unknown_fields=True):
    """How many tasks there are; None if there are more than MANY."""

    count: int | None


class InfoRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for `Info`. Tasks are counted only on demand, because all of them have to be loaded for that."""

    count_tasks: bool = True


class EnvServerInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a server serves."""

    name: str
    version: str
    taskset: dict[str, Any]
    harness: dict[str, Any]
    runtime: dict[str, Any]
    model: str
    trainable: bool
    rewards: dict[str, float]
    group_rewards: dict[str, float]
    metrics: list[str]
    sampling: dict[str, Any]
    limits: dict[str, int | None]
    environment: dict[str, Any]
    """The identity of what is served: digests of its code by file, and its configuration."""
    num_tasks: int | None = None
    """None if there are more than MANY, or if they were not counted."""

    @property
    def environment_digest(self) -> str:
        """The digest of the environment's identity."""
        return compute_environment_digest(self.environment)


def compute_environment_digest(identity: dict[str, Any]) -> str:
    """Return the digest of an environment's identity."""
    return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:16]


class WorkerHealth(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One worker as it is."""

    id: str
    pid: int
    state: str
    load: int
    lag: float
    silence: float
    age: float
    memory: float
    """MiB."""


class WorkerLoss(msgspec.Struct, forbid_unknown_fields=True):
    """A worker that is no more, against its will."""

    worker: str
    at: float
    reason: str
    attempts: int
    """How many attempts it held."""


class EnvServerHealth(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a server does: `ok`, `booting`, `broken` (no worker will boot) or `closing`."""

    state: str
    reason: str
    running: int
    waiting: int
    workers: list[WorkerHealth]
    deaths: list[WorkerLoss]


class ScalingDecision(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the pool."""

    at: float
    before: int
    after: int
    reason: str


class EnvServerStats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a server has done."""

    uptime: float
    worst_lag: float
    """The longest the broker's own event loop stood still."""
    counts: dict[str, int]
    failures: dict[str, int]
    decisions: list[ScalingDecision]
    workers: list[WorkerHealth]
    worker_lag: dict[str, float]
    """The longest each worker's event loop stood still."""


class WorkerSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told when it is started."""

    id: str
    source: dict[str, Any]
    config: dict[str, Any]
    secret: str


class WorkerReady(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a worker says when it can work, or why it cannot."""

    pid: int
    address: str = ""
    info: EnvServerInfo | None = None
    failure: Failure | None = None
