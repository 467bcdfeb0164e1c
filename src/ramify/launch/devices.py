"""Allocation of cores and GPUs to the processes of a run.

On a CPU the engine and the trainer compute at the same time, and oversubscribed threads are slower than fewer threads:
on two cores, 2 + 2 threads are 2.4 times slower than 1 + 1. So both get half of the cores, every other process one
thread, and waits are passive. GPUs are split, the engine's first, or shared by both.
"""

import os
from dataclasses import dataclass, field
from typing import Literal

from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.infer.config import EngineConfig, ExternalConfig
from ramify.launch.machine import count_usable_cores
from ramify.orchestrate.config import RunConfig
from ramify.processes.probe import run_probe

QUERY_TIMEOUT = 10.0  # seconds
NVIDIA_SMI_QUERY = ["nvidia-smi", "--query-gpu=index,memory.total,name", "--format=csv,noheader,nounits"]
GIB = 1 << 30
MAX_THREADS_WITH_GPU = 8  # CPU threads of a process that computes on a GPU


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; `memory` is in bytes, None if it is unknown."""

    index: str
    name: str
    memory: int | None
    is_assumed: bool = False
    """Whether it is only assumed, for a dry run on a machine without GPUs."""

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def label(self) -> str:
        """Its number and, if it is only assumed, that it is not here."""
        return str(self) if self.is_assumed else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """The threads and GPUs of one process."""

    threads: int
    gpus: list[Gpu] = field(default_factory=list[Gpu])

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that limit a process to its devices."""
        threads = str(self.threads)
        cores = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": threads}
        return {**cores, "CUDA_VISIBLE_DEVICES": ",".join(gpu.index for gpu in self.gpus)}

    def __str__(self) -> str:
        return ", ".join([format_count(self.threads, "thread"), *map(str, self.gpus)])


@dataclass(frozen=True, slots=True)
class DeviceAllocations:
    """The devices of the inference engine, of the trainer, and of any other process."""

    inference: DeviceAllocation
    trainer: DeviceAllocation
    other: DeviceAllocation

    @property
    def is_colocated(self) -> bool:
        """Whether engine and trainer share a GPU."""
        return bool(self.inference.gpus) and self.inference.gpus == self.trainer.gpus

    @property
    def gpus_by_role(self) -> tuple[list[Gpu], list[Gpu]]:
        """The GPUs of the engine and of the trainer."""
        return self.inference.gpus, self.trainer.gpus

    @property
    def is_assumed(self) -> bool:
        """Whether the GPUs are not on this machine."""
        return any(gpu.is_assumed for gpu in (*self.inference.gpus, *self.trainer.gpus))


def list_visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use; none without a driver."""
    probe = run_probe(NVIDIA_SMI_QUERY, timeout=QUERY_TIMEOUT)
    rows = [line.split(", ", 2) for line in probe.text.splitlines()] if probe.ok else []
    gpus = [Gpu(index, name, int(memory) << 20) for index, memory, name in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return [gpu for index in visible.split(",") for gpu in gpus if gpu.index == index.strip()]


def uses_gpu(device: Literal["cpu", "cuda", "auto", "none"], gpus: list[Gpu]) -> bool:
    """Return whether a process with the setting `device` computes on a GPU, given the GPUs of the machine."""
    return device == "cuda" or (device == "auto" and bool(gpus))


def allocate_for_run(config: RunConfig, *, dry_run: bool, gpus: list[Gpu] | None) -> DeviceAllocations:
    """Allocate the devices of this machine or, for a dry run without GPUs, of one that is like `cluster.node`."""
    inference, node = config.inference, config.cluster.node
    gpus, gpu_bytes = list_visible_gpus() if gpus is None else gpus, int(node.gpu_memory_gib * GIB)
    if dry_run and not gpus:
        gpus = assume_gpus(node.gpus, gpu_bytes)
    device = inference.device if isinstance(inference, EngineConfig) else "auto"
    starts_engine = not isinstance(inference, ExternalConfig) or any(
        model.is_managed for model in config.all_models.values()
    )
    return allocate_devices(
        count_usable_cores(),
        gpus,
        inference=device if starts_engine else "none",
        trainer=config.trainer.device,
        placement=config.launch.gpu_placement,
        trainer_gpus=config.launch.trainer_gpus,
        assumed_gpu_bytes=gpu_bytes if dry_run else None,
    )


def assume_gpus(count: int, gpu_bytes: int) -> list[Gpu]:
    """Return GPUs of a machine that is not this one."""
    return [Gpu(str(number), "not on this machine", gpu_bytes, is_assumed=True) for number in range(count)]


def allocate_devices(
    cores: int,
    gpus: list[Gpu],
    *,
    inference: Literal["cpu", "cuda", "auto", "none"],
    trainer: Literal["cpu", "cuda", "auto"],
    placement: Literal["auto", "split", "colocated"],
    trainer_gpus: int = 1,
    assumed_gpu_bytes: int | None = None,
) -> DeviceAllocations:
    """Allocate cores and GPUs. With `assumed_gpu_bytes`, a machine without GPUs is treated as if it had those needed.

    Raises ConfigInvalid if there are too few GPUs, or if the keys of `launch` contradict each other.
    """
    engine_on_gpu, trainer_on_gpu = uses_gpu(inference, gpus), uses_gpu(trainer, gpus)
    both_on_gpu = engine_on_gpu and trainer_on_gpu
    if trainer_gpus > 1 and not trainer_on_gpu:
        problem = f"{trainer_gpus} requires a trainer on GPUs; it runs on the CPU (trainer.device is {trainer!r})"
        advice = "set trainer.device to 'cuda', or launch.trainer_gpus to 1"
        raise ConfigInvalid(f"{problem}: {advice}", key="launch.trainer_gpus")
    if trainer_gpus > 1 and both_on_gpu and placement != "split":
        raise ConfigInvalid(f"{trainer_gpus} requires launch.gpu_placement = 'split'", key="launch.trainer_gpus")
    if placement != "auto" and not both_on_gpu:
        component = "engine" if trainer_on_gpu else "trainer"
        problem = f"{placement!r} requires both engine and trainer on GPUs; the {component} has none"
        raise ConfigInvalid(problem, key="launch.gpu_placement")
    is_split = both_on_gpu and (placement == "split" or (placement == "auto" and len(gpus) > 1))
    num_needed = (1 + trainer_gpus) if is_split else trainer_gpus if trainer_on_gpu else int(engine_on_gpu)
    if len(gpus) < num_needed:
        if assumed_gpu_bytes is None or gpus:
            problem = f"the run needs {format_count(num_needed, 'GPU')}, found {len(gpus)}"
            raise ConfigInvalid(problem, key="launch.gpu_placement")
        gpus = assume_gpus(num_needed, assumed_gpu_bytes)
    threads = max(1, cores // 2 if inference != "none" else cores - 1)

    def allocate(gpus: list[Gpu]) -> DeviceAllocation:
        return DeviceAllocation(min(threads, MAX_THREADS_WITH_GPU) if gpus else threads, gpus)

    first_trainer_gpu = 1 if is_split else 0
    return DeviceAllocations(
        inference=allocate(gpus[:1] if engine_on_gpu else []),
        trainer=allocate(gpus[first_trainer_gpu : first_trainer_gpu + trainer_gpus] if trainer_on_gpu else []),
        other=DeviceAllocation(1),
    )
