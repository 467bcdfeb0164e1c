"""Who gets which cores and which GPUs.

On a CPU the engine and the trainer compute at the same time, and threads that contend are worse than none: on two
cores, 2 + 2 threads are 2.4 times slower than 1 + 1. So each gets its share, everything else one, and waits are
passive. GPUs are split, the engine's first, or shared by both.
"""

import os
from dataclasses import dataclass, field
from typing import Literal

from ramify.config import raise_config_invalid
from ramify.launch.subprocess_probe import run_probe

QUERY_TIMEOUT = 10.0  # seconds for the driver to say what there is
NVIDIA_SMI_QUERY = ["nvidia-smi", "--query-gpu=index,memory.total,name", "--format=csv,noheader,nounits"]
MAX_THREADS_WITH_GPU = 8  # threads beside a GPU, which does the work itself


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine; `memory` in bytes, None where it was only asked for."""

    index: str
    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """What a process may use."""

    threads: int
    gpus: list[Gpu] = field(default_factory=list[Gpu])

    @property
    def env(self) -> dict[str, str]:
        """The variables that say so."""
        threads = str(self.threads)
        cores = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": threads}
        return {**cores, "CUDA_VISIBLE_DEVICES": ",".join(gpu.index for gpu in self.gpus)}

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return ", ".join([threads, *(f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus)])


@dataclass(frozen=True, slots=True)
class DeviceAllocations:
    """Who gets what."""

    inference: DeviceAllocation
    trainer: DeviceAllocation
    other: DeviceAllocation

    @property
    def is_colocated(self) -> bool:
        """Whether engine and trainer are on the same GPU."""
        return bool(self.inference.gpus) and self.inference.gpus == self.trainer.gpus


def visible_gpus() -> list[Gpu]:
    """The GPUs that we may use, as the driver shows them; none without a driver."""
    told = run_probe(NVIDIA_SMI_QUERY, timeout=QUERY_TIMEOUT)
    found = [line.split(", ", 2) for line in told.text.splitlines()] if told.ok else []
    gpus = [Gpu(index, name, int(memory) << 20) for index, memory, name in found]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return gpus
    return [gpu for index in allowed.split(",") for gpu in gpus if gpu.index == index.strip()]


def uses_gpu(device: Literal["cpu", "cuda", "auto", "none"], gpus: list[Gpu]) -> bool:
    """Whether what is told to use `device` computes on a GPU where these are."""
    return device == "cuda" or (device == "auto" and bool(gpus))


def allocate_devices(
    cores: int,
    gpus: list[Gpu],
    *,
    inference: Literal["cpu", "cuda", "auto", "none"],
    trainer: Literal["cpu", "cuda", "auto"],
    mode: Literal["auto", "split", "shared"],
    trainer_gpus: int = 1,
    assume_gpus: bool = False,
) -> DeviceAllocations:
    """Divide the machine. With `assume`, GPUs that a config asks for and that are not here are taken as given."""
    engine_gpu, trainer_gpu = uses_gpu(inference, gpus), uses_gpu(trainer, gpus)
    both = engine_gpu and trainer_gpu
    if trainer_gpus > 1 and not (trainer_gpu and (mode == "split" or not both)):
        raise_config_invalid(
            [("launch.trainer_gpus", f"{trainer_gpus} GPUs need a trainer on GPUs of its own: launch.gpus = 'split'")]
        )
    if mode != "auto" and not both:
        where = "the engine" if trainer_gpu else "the trainer"
        raise_config_invalid([("launch.gpus", f"{mode!r} needs engine and trainer on GPUs, and {where} is on none")])
    split = both and (mode == "split" or (mode == "auto" and len(gpus) > 1))
    wanted = (1 + trainer_gpus) if split else trainer_gpus if trainer_gpu else int(engine_gpu)
    if len(gpus) < wanted:
        if not assume_gpus or gpus:
            found = f"{len(gpus)} {'is' if len(gpus) == 1 else 'are'} here"
            raise_config_invalid([("launch.gpus", f"the run needs {wanted} GPU{'s' if wanted > 1 else ''}, {found}")])
        gpus = [Gpu(str(number), "not on this machine", None) for number in range(wanted)]
    ours = gpus[1 : 1 + trainer_gpus] if split else gpus[:trainer_gpus]
    half = max(1, cores // 2 if inference != "none" else cores - 1)
    return DeviceAllocations(
        inference=DeviceAllocation(
            min(half, MAX_THREADS_WITH_GPU) if engine_gpu else half, gpus[:1] if engine_gpu else []
        ),
        trainer=DeviceAllocation(min(half, MAX_THREADS_WITH_GPU) if trainer_gpu else half, ours if trainer_gpu else []),
        other=DeviceAllocation(1),
    )
