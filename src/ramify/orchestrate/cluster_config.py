"""`[cluster]`: how many processes of each role a run has, and on which nodes they are placed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ramify.core.config import Config

TIME_LIMIT_PATTERN = r"(\d+-)?\d+(:\d{2}){0,2}"
REMOTE_KEYS = ("address", "join_timeout", "kubernetes", "lease_duration", "node", "num_nodes", "slurm")


def _count_seconds(time_limit: str) -> int:
    """Return the seconds of a time limit of sbatch: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0 means no limit."""
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class PlacementConfig(Config):
    """What each process of a role gets, and where it may run."""

    cores: int | None = Field(default=None, ge=1)
    """Cores of each process. Default: derived from a node's cores."""
    nodes: list[str] = []
    """Names or addresses of the nodes that may run it. Empty: any node."""
    max_per_node: int | None = Field(default=None, ge=1)
    """Most of these processes on one node. None: as many as fit."""


class EnginePlacementConfig(PlacementConfig):
    """The engines of the policy."""

    num_replicas: int | None = Field(default=None, ge=1)
    """Number of engines. Default: as many as the GPUs that the trainer leaves have room for or, without GPUs, one."""


class ModelPlacementConfig(PlacementConfig):
    """The engines of the other models, one for each of `[models]` that the run starts."""


class EnvServerPlacementConfig(PlacementConfig):
    """The env servers, which run the rollouts."""

    num_per_source: int | None = Field(default=None, ge=1)
    """Env servers of each train source; an eval source has one. Default: one per node, at most 16."""


class TrainerPlacementConfig(PlacementConfig):
    """The ranks of the trainer, which start and end together."""

    num_ranks: int | None = Field(default=None, ge=1)
    """Number of ranks, with one GPU each if there are GPUs. Default: as `launch.trainer_gpus` or, without GPUs, one."""


class NodeShapeConfig(Config):
    """What each node has: for allocations, and for `--dry-run` where there is no cluster."""

    cores: int = Field(default=8, ge=1)
    gpus: int = Field(default=0, ge=0)
    memory_gib: float = Field(default=32.0, gt=0)
    """GiB of memory."""
    gpu_memory_gib: float = Field(default=80.0, gt=0)
    """GiB of memory of each GPU, also of a cluster that runs: Ray does not report it."""

    @property
    def gpu_bytes(self) -> int:
        """`gpu_memory_gib` in bytes."""
        return int(self.gpu_memory_gib * 2**30)


class SlurmConfig(Config):
    """The batch script that `ramify slurm` writes."""

    partition: str | None = None
    account: str | None = None
    time_limit: str = "24:00:00"
    """Wall time of one allocation, in the format of `sbatch --time`, longer than `stop_seconds`; the job is requeued
    until the run is finished."""
    stop_seconds: int = Field(default=300, ge=60)
    """Seconds before the end of the allocation at which the run is asked to stop. It then has 30 seconds less than
    this to save a checkpoint; that time replaces `launch.grace_period`."""
    setup: list[str] = []
    """Shell commands that the script runs first, such as `source /shared/venv/bin/activate`. Each entry is a complete
    command: an `if` and its `fi` are in the same one. Variables that they export reach all nodes. The job ends if one
    fails."""
    extra_args: list[str] = []
    """Further options of sbatch, such as `--constraint=h100`."""

    @field_validator("time_limit")
    @classmethod
    def _time_limit_has_sbatch_format(cls, text: str) -> str:
        if not re.fullmatch(TIME_LIMIT_PATTERN, text):
            raise ValueError(f"expected [DAYS-]HH:MM:SS, got {text!r}")
        return text

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a time limit with which the job would be asked to stop at its start, and requeued without end."""
        seconds = _count_seconds(self.time_limit)
        if 0 < seconds <= self.stop_seconds:
            problem = f"expected more than stop_seconds ({self.stop_seconds} s), got {self.time_limit!r} ({seconds} s)"
            yield "time_limit", f"{problem}; raise it, or lower stop_seconds"


class KubernetesConfig(Config):
    """The RayJob that `ramify k8s` writes."""

    image: str = ""
    """Container image with Ramify, `ray[default]`, and the plugins of the run. Required by `ramify k8s`."""
    namespace: str = "default"
    volume_claim: str = ""
    """PersistentVolumeClaim (ReadWriteMany) that is mounted at `shared_directory`. Required by `ramify k8s`."""
    secrets: list[str] = []
    """Names of Secrets whose keys become environment variables, such as API keys."""
    node_selector: dict[str, str] = {}
    """Labels that the Kubernetes nodes of the run must have."""
    retries: int = Field(default=10, ge=0)
    """How often Kubernetes starts the job again, on new pods, after it has failed."""


class ClusterConfig(Config):
    """Where processes are placed: on this machine, which is a cluster of one node, or on several (`--cluster ray`)."""

    launcher: Literal["local", "ray"] = "local"
    """What starts the processes: `local` on this machine, `ray` on the nodes of a Ray cluster."""
    address: str = "auto"
    """Address of the cluster: `auto` (the one that this node belongs to) or HOST:PORT of Ray's head."""
    num_nodes: int | None = Field(default=None, ge=1)
    """Nodes to wait for before the run starts. None: those that the cluster has now."""
    join_timeout: float = Field(default=600.0, gt=0)
    """Seconds until `num_nodes` nodes must have joined."""
    shared_directory: Path | None = None
    """A directory that all nodes reach; required if there is more than one. A run has a directory of its name in it,
    with checkpoints, weights, images and the log from which another head can continue the run."""
    lease_duration: float = Field(default=60.0, ge=5)
    """Seconds that a process may run on a node without contact to the head; longer than the orchestrator needs to
    restart."""
    engines: EnginePlacementConfig = EnginePlacementConfig()
    models: ModelPlacementConfig = ModelPlacementConfig()
    env_servers: EnvServerPlacementConfig = EnvServerPlacementConfig()
    trainer: TrainerPlacementConfig = TrainerPlacementConfig()
    node: NodeShapeConfig = NodeShapeConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a shared directory that not all nodes can reach."""
        directory = self.shared_directory
        if self.is_distributed and (self.num_nodes or 1) > 1 and directory is None:
            yield "shared_directory", "several nodes need a directory that all of them reach"
        if self.is_distributed and directory is not None and not directory.is_absolute():
            yield "shared_directory", f"expected an absolute path, the same on all nodes, got {directory}"

    @property
    def is_distributed(self) -> bool:
        """Whether the processes of the run are started on the nodes of a cluster."""
        return self.launcher != "local"


def find_unused_keys(cluster: ClusterConfig) -> list[str]:
    """Return the keys that have no effect because no launcher is chosen; [] if one is, even if it is `local`."""
    if "launcher" in cluster.model_fields_set:
        return []
    return [f"cluster.{key}" for key in REMOTE_KEYS if key in cluster.model_fields_set]
