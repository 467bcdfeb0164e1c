"""The requests and responses of an env server. Traces are sent as blobs next to these messages.

The field names are part of the protocol; the class names are not.
"""

import hashlib
from typing import Any

import msgspec

from ramify.core.errors import Failure

MAX_COUNTED_TASKS = 100_000  # a taskset with more tasks counts as infinite


class RolloutRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request to run one rollout of a task."""

    task: dict[str, Any]
    id: str
    group: str = ""
    attempt: int = 0
    seed: int = 0
    train: bool = False
    sampling: dict[str, Any] | None = None
    """Sampling parameters that override the source's."""
    stream: bool = False
    """Whether to send updates while the rollout runs."""
    environment: str = ""
    """The digest of the expected environment; a server with another environment refuses the request. Empty: not
    checked."""


class RolloutUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """Progress of a running rollout: the phase it enters, or "turn" after a model call, and its number of calls."""

    phase: str
    num_calls: int


class RolloutResponse(msgspec.Struct, forbid_unknown_fields=True):
    """The result of a rollout; the blob is its encoded episode."""

    worker: str
    crashes: int = 0  # workers that were lost while they ran the rollout


class TasksRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a page of tasks."""

    start: int
    count: int


class TaskItem(msgspec.Struct, forbid_unknown_fields=True):
    """A task and its identity."""

    identity: str
    task: dict[str, Any]


class TaskPage(msgspec.Struct, forbid_unknown_fields=True):
    """A page of tasks in order; `end`: there are no further tasks."""

    tasks: list[TaskItem]
    end: bool


class ScoreGroupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for the group rewards of all attempts at a task; the blobs are their traces."""

    task: dict[str, Any]
    environment: str = ""


class GroupScores(msgspec.Struct, forbid_unknown_fields=True):
    """The group rewards and the failures of each trace, and its metrics and `info` after the scoring."""

    rewards: list[dict[str, tuple[float, float] | None]]
    errors: list[list[Failure]]
    metrics: list[dict[str, float]]
    info: list[dict[str, Any]]


class CancelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to cancel rollouts by id."""

    ids: list[str]


class AddressUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """New addresses of inference servers. Servers that it does not mention keep their addresses."""

    inference: list[str] | None = None
    """The servers of the model that the agents call; None keeps the current ones, [] means none at the moment."""
    models: dict[str, list[str]] = {}
    """The servers of other models of the run, by name; models that are missing keep theirs."""


class TaskCount(msgspec.Struct, forbid_unknown_fields=True):
    """The number of tasks; None if there are more than MAX_COUNTED_TASKS."""

    count: int | None


class InfoRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for `EnvServerInfo`. Tasks are counted only on demand, because that loads all of them."""

    count_tasks: bool = True


class EnvServerInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A description of the environment that a server runs."""

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
    environment: dict[str, Any]  # the identity of the environment: digests of its code by file, and its configuration
    num_tasks: int | None = None  # None if there are more than MAX_COUNTED_TASKS, or if they were not counted

    @property
    def environment_digest(self) -> str:
        """The digest of the environment's identity."""
        return compute_environment_digest(self.environment)


def compute_environment_digest(identity: dict[str, Any]) -> str:
    """Return the digest of an environment's identity."""
    return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:16]


class WorkerHealth(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The current state of a worker."""

    id: str
    pid: int
    state: str  # a value of `WorkerState`
    load: int  # the number of attempts that run on it
    lag: float  # seconds since the last iteration of its event loop, as its last heartbeat reported
    silence: float  # seconds since its last message
    age: float  # seconds since its start
    memory: float  # MiB


class WorkerLoss(msgspec.Struct, forbid_unknown_fields=True):
    """A worker that exited, was killed, hung or did not boot."""

    worker: str
    at: float  # seconds since the start of the server
    reason: str
    attempts: int  # the number of attempts that ran on it


class EnvServerHealth(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state of a server: `ok`, `booting`, `broken` (workers fail to boot) or `closing`."""

    state: str
    reason: str
    running: int
    waiting: int
    workers: list[WorkerHealth]
    deaths: list[WorkerLoss]


class ScalingDecision(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the number of workers."""

    at: float  # seconds since the start of the server
    before: int
    after: int
    reason: str


class EnvServerStats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Counters and history of a server."""

    uptime: float
    worst_lag: float  # the longest pause of the broker's event loop, in seconds
    counts: dict[str, int]  # requests by method, those answered (`run_done`), and events of the pool
    failures: dict[str, int]  # failed requests by the name of the error
    decisions: list[ScalingDecision]
    workers: list[WorkerHealth]
    worker_lag: dict[str, float]  # the longest pause of each worker's event loop, in seconds


class WorkerSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The configuration that a worker receives at its start."""

    id: str
    source: dict[str, Any]  # the `SourceConfig`
    config: dict[str, Any]  # the `EnvServerConfig`
    secret: str  # the secret of the connection between broker and worker


class WorkerReady(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A worker's report that it is ready, or why it failed to boot."""

    pid: int
    address: str = ""
    info: EnvServerInfo | None = None
    failure: Failure | None = None
