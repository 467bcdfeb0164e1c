"""Rough estimate of the disk space that checkpoints and published weights need, compared with the free space.

A new checkpoint is complete before an old one is removed. So a run that saves more than once needs room for two
checkpoints, and for one more than `checkpoint.keep_last` to keep all of them. Four versions of the weights can be on
the disk at the same time: the engines serve one and load another, a third waits, and the trainer writes a fourth.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ramify.core.files import get_free_bytes
from ramify.core.names import format_count
from ramify.core.watchdog import watch_storage
from ramify.launch.machine import GIB, list_visible_gpus, uses_gpu
from ramify.launch.memory import LORA_PARAMETER_FRACTION, MASTER_BYTES, MOMENT_BYTES, ModelSize, get_element_bytes
from ramify.orchestrate.config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR
from ramify.train.weights_directory import WEIGHTS_DIR

MOMENT_BYTES_BY_OPTIMIZER = {"adamw": MOMENT_BYTES, "muon": MOMENT_BYTES // 2}  # per trained parameter, at least
MAX_VERSIONS = 4  # of published weights that are on the disk at the same time
RESERVE_BYTES = 8 << 20  # for rollouts, ledger and logs


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """What a run writes to the disk of `directory`, and how many bytes there are for it, in bytes."""

    directory: Path
    checkpoint: int
    weights: int
    """All versions of the published weights that are on the disk at the same time."""
    num_saves: int
    """Checkpoints that the run saves until its end."""
    keep_last: int
    available: int
    """Free space, and what checkpoints and weights of this run already take."""
    is_guessed: bool
    """Whether the size of the model is a guess from its name."""

    @property
    def num_fitting(self) -> int:
        """The number of checkpoints that fit beside the published weights and the reserve."""
        return max(0, self.available - self.weights - RESERVE_BYTES) // self.checkpoint

    def find_problem(self) -> str | None:
        """Return why the run cannot save all its steps; None if it can."""
        if self.num_fitting >= (num_needed := min(2, self.num_saves)):
            return None
        needed = self.weights + RESERVE_BYTES + num_needed * self.checkpoint
        reason = " (a new one is complete before the old one is removed)" if num_needed > 1 else ""
        advice = "free some space, set `output` to a larger disk, or train adapters ([trainer.lora])"
        return (
            f"the disk of {self.directory} is too small: {format_count(num_needed, 'checkpoint')} of "
            f"{format_size(self.checkpoint)}{reason}, published weights and logs need about "
            f"{format_size(needed)}, {format_size(self.available)} are available; {advice}"
        )

    def format_lines(self) -> list[str]:
        """Return the estimate as lines of a plan, with a warning if the disk is too small."""
        sizes = f"checkpoint {format_size(self.checkpoint)}, published weights {format_size(self.weights)}"
        warning = self.find_warning()
        line = f"disk, roughly: {sizes}; {format_size(self.available)} available in {self.directory}"
        return [line, *([f"warning: {warning}"] if warning else [])]

    def find_warning(self) -> str | None:
        """Return why the run cannot keep as many checkpoints as it should; None if it can."""
        if (problem := self.find_problem()) is not None:
            return problem
        if self.num_fitting >= min(self.keep_last + 1, self.num_saves):
            return None
        fitting = f"the disk of {self.directory} has room for {self.num_fitting} checkpoints"
        return (
            f"{fitting} of {format_size(self.checkpoint)}; checkpoint.keep_last = {self.keep_last} needs "
            f"{self.keep_last + 1} for a moment: older ones are removed earlier, the last one never"
        )


def estimate_disk(config: RunConfig) -> DiskEstimate | None:
    """Estimate the disk space of a run; None if the size of its model or the free space is unknown."""
    if (model := ModelSize.from_name(config.model.name)) is None:
        return None
    trainer, directory = config.trainer, config.shared_path or config.path
    num_trained = model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)
    num_versions = 1 if config.weights.is_in_memory else get_max_versions(config)
    is_elsewhere = config.shared_path is not None and trainer.device != "cpu"  # the trainer's node may have GPUs
    gpu = is_elsewhere or uses_gpu(trainer.device, len(list_visible_gpus()))
    parents = directory.absolute().parents
    # A shared directory that does not exist may be mounted on other machines only; any other directory is created here.
    available = _measure_available(directory, parents if config.shared_path is None else parents[:1])
    if available is None:
        return None
    return DiskEstimate(
        directory,
        checkpoint=max(1, int(num_trained * (MASTER_BYTES + MOMENT_BYTES_BY_OPTIMIZER[trainer.optim.type]))),
        weights=num_versions * model.num_parameters * get_element_bytes(trainer.dtype, gpu),
        num_saves=math.ceil(config.max_steps / config.checkpoint.interval),
        keep_last=config.checkpoint.keep_last,
        available=available,
        is_guessed=model.is_guessed,
    )


def get_max_versions(config: RunConfig) -> int:
    """Return the number of published versions of the weights that exist at the same time."""
    return min(MAX_VERSIONS, config.max_steps + 1)


def _measure_available(directory: Path, parents: Sequence[Path]) -> int | None:
    """Return the free bytes for the run in `directory`: its own checkpoints and weights count as free.

    None if neither it nor one of `parents` exists, or the disk cannot be read or does not report its size.
    """
    try:
        with watch_storage(directory):
            existing = next((path for path in (directory, *parents) if path.exists()), None)
            free = None if existing is None else get_free_bytes(existing)
            return None if free is None else free + sum(_iter_file_sizes(directory))
    except OSError:
        return None


def _iter_file_sizes(run: Path) -> Iterator[int]:
    """Yield the sizes of the files of a run's checkpoints and weights, without files that are removed meanwhile."""
    for name in (CHECKPOINTS_DIR, WEIGHTS_DIR):
        for parent, _, files in os.walk(run / name):
            for file in files:
                with contextlib.suppress(OSError):
                    yield Path(parent, file).lstat().st_size


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
