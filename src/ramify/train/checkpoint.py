"""Checkpoints: everything a run needs to go on, as if nothing had happened.

A checkpoint is a directory that torch's distributed checkpointing (DCP) fills: all ranks write their shares at once,
and any number of ranks can read them back. It is written beside its place and renamed into it, so what bears a step's
name was complete when it was renamed; checksums show whether it still is (`checkpoint_manifest`). A disk that is full
fails the save by name and leaves the checkpoints before it as they were.
"""

import contextlib
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ramify.errors import CheckpointRefused, RamifyError, StorageFailed, StorageFull
from ramify.store.run_writer import is_disk_full, to_storage_error
from ramify.store.segment_log import fsync_directory
from ramify.train.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    checksum_files,
    find_intact_step,
    get_step_directory,
    list_completed_steps,
    list_saved_steps,
    verify_checkpoint,
)
from ramify.train.checkpoint_metadata import METADATA_FILE, MetadataReader
from ramify.train.distributed import Ranks
from ramify.train.trainer import Trainer

MIN_FREE_BYTES = 16 << 20  # bytes; a disk with less left is full

T = TypeVar("T")


class CheckpointManager:
    """The checkpoints of a run. Ranks save and load together; the first of them moves and removes."""

    def __init__(self, directory: Path, ranks: Ranks, *, warn: Callable[[str], None] = lambda line: None) -> None:
        self.directory, self.ranks, self.warn = directory, ranks, warn

    def list_steps(self) -> list[int]:
        """The steps that have a checkpoint, rising."""
        return list_saved_steps(self.directory)

    def newest_step(self) -> int:
        """The newest step whose checkpoint was completed, even if it is damaged now; 0 if there is none."""
        return max(list_completed_steps(self.directory), default=0)

    def path_for(self, step: int) -> Path:
        return get_step_directory(self.directory, step)

    def save(self, trainer: Trainer, step: int, note: Mapping[str, Any] | None = None) -> Path:
        """Keep the trainer as it is after `step` steps. Raises StorageFull or StorageFailed, with nothing changed."""
        place = self.path_for(step)
        if self.ranks.broadcast(step in self.list_steps()):
            return place
        aside = place.with_name(f".{place.name}.partial")
        try:
            with self.ranks.raise_together(), _translate_storage_errors(self.directory):
                if self.ranks.is_first:
                    self.remove_partial()
                    if place.exists():  # a checkpoint without its manifest: somebody has removed a part of it
                        place.rename(place.with_name(f".{place.name}.gone.partial"))
                        self.remove_partial()
                    aside.mkdir(parents=True)
            records: dict[str, FileRecord] = {}
            with self.ranks.raise_together(), _translate_storage_errors(self.directory):
                writer = FileSystemWriter(aside, single_file_per_rank=True, sync_files=True)
                with ignore_single_process_warning():
                    state_dict_saver.save(
                        dict(_iter_state_tensors(trainer)), storage_writer=writer, no_dist=self.ranks.world_size == 1
                    )
                records = checksum_files(sorted(aside.glob(f"__{self.ranks.rank}_*")))
            collected = {name: record for share in self.ranks.all_gather(records) for name, record in share.items()}
            with self.ranks.raise_together(), _translate_storage_errors(self.directory):
                if self.ranks.is_first:
                    files = {**checksum_files([aside / METADATA_FILE]), **collected}
                    _check_complete(aside, files)
                    optimizer = trainer.config.optim.type
                    CheckpointManifest(step=step, optimizer=optimizer, note=dict(note or {}), files=files).write(aside)
                    aside.rename(place)
                    fsync_directory(self.directory)
        except RamifyError:
            if self.ranks.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return place

    def load(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Put the trainer back to where it was after `step` steps; returns the note.

        Every file is verified before anything is read. Raises CheckpointRefused, on all ranks alike.
        """
        place, kind, ranks = self.path_for(step), trainer.config.optim.type, self.ranks
        manifest = self._read_or_suggest(
            step, lambda: verify_checkpoint(place, rank=ranks.rank, world_size=ranks.world_size)
        )
        if manifest.files is None:
            self.warn(f"{place} was written by a version that made no checksums: it is loaded without verification")
        reader = self._read_or_suggest(step, lambda: MetadataReader(place))
        state: dict[str, Tensor] = {}
        with ranks.raise_together():
            if manifest.optimizer != kind:
                raise CheckpointRefused(f"{place} was written by {manifest.optimizer}, this run has {kind}")
            state = _allocate_state(trainer, reader.metadata.state_dict_metadata, place)
        try:
            with ignore_single_process_warning():
                state_dict_loader.load(state, storage_reader=reader, no_dist=ranks.world_size == 1)
        except CheckpointException as error:
            raise CheckpointRefused(
                f"{place} cannot be read: {_find_root_cause(error)}; {self._suggest_recovery(step)}"
            ) from error
        _restore_state(trainer, state)
        return manifest.note

    def read_note(self, step: int) -> dict[str, Any]:
        """What the run wrote down beside the checkpoint of `step`. Raises CheckpointRefused."""
        return self._read_or_suggest(step, lambda: CheckpointManifest.read(self.path_for(step))).note

    def _read_or_suggest(self, step: int, read: Callable[[], T]) -> T:
        """Return what `read` returns. If it raises CheckpointRefused on one rank, raise it on all, with advice."""
        results: list[T] = []
        try:
            with self.ranks.raise_together():
                results.append(read())
        except CheckpointRefused as error:
            raise CheckpointRefused(f"{error.message}; {self._suggest_recovery(step)}") from error
        return results[0]

    def _suggest_recovery(self, step: int) -> str:
        """Return what to do when the checkpoint of `step` is refused. A collective: every rank must call it."""
        intact = self.ranks.broadcast(find_intact_step(self.directory, step) if self.ranks.is_first else None)
        if intact is None:
            return "no other checkpoint is intact: restore its files from a copy, or start a new run"
        command = f"ramify rollback {shlex.quote(str(self.directory.parent))} {intact}"
        return f"the newest intact checkpoint is {self.path_for(intact)}: '{command}' makes the run continue from there"

    def remove_after(self, step: int) -> None:
        """Remove what never became part of the run's history: newer checkpoints, and halves."""
        self._remove(each for each in self.list_steps() if each > step)
        if self.ranks.is_first:
            self.remove_partial()

    def remove_all_but_last(self, count: int) -> None:
        """Remove all but the newest `count`."""
        self._remove(self.list_steps()[:-count])

    def remove_partial(self) -> None:
        """Remove what a save that was interrupted left behind."""
        for half in self.directory.glob(".step_*.partial"):
            shutil.rmtree(half, ignore_errors=True)

    def _remove(self, steps: Iterable[int]) -> None:
        """By a rename first: a checkpoint is never seen half removed."""
        steps = list(steps)
        self.ranks.barrier()  # nobody still looks at what is there
        for step in steps if self.ranks.is_first else ():
            gone = self.path_for(step).with_name(f".step_{step:06}.gone.partial")
            self.path_for(step).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        self.ranks.barrier()


def _check_complete(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise StorageFailed unless the directory holds exactly the files that the ranks have computed checksums of."""
    if unexpected := sorted({path.name for path in directory.iterdir()} ^ set(files)):
        problem = f"missing or without a checksum: {', '.join(unexpected)}"
        raise StorageFailed(f"{directory} should hold {', '.join(sorted(files))}; {problem}")


@contextlib.contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """Silence torch's warning that only a single process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _iter_state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Everything that changes from step to step, under names that do not depend on the number of ranks."""
    for name, master in trainer.master_weights.named_parameters():
        yield f"model/{name}", master.detach()
        for field, value in _find_optimizer(trainer, master).state.get(master, {}).items():
            yield f"optim/{name}/{field}", value
    yield "rng/cpu", torch.get_rng_state()
    if trainer.device.type == "cuda":
        yield "rng/cuda", torch.cuda.get_rng_state(trainer.device)


def _find_optimizer(trainer: Trainer, master: Tensor) -> torch.optim.Optimizer:
    for part in trainer.optimizer.optimizers:
        if any(master is each for group in part.param_groups for each in group["params"]):
            return part
    raise ValueError("a master weight that no optimizer updates")


def _allocate_state(trainer: Trainer, saved_metadata: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Tensors to read into: the masters themselves, and new ones for what the optimizer keeps."""
    masters = dict(trainer.master_weights.named_parameters())
    there = {key.removeprefix("model/") for key in saved_metadata if key.startswith("model/")}
    if there != set(masters):
        odd = sorted(there ^ set(masters))
        raise CheckpointRefused(f"{path} is of another model: {len(odd)} weights differ, such as {odd[0]}")
    state: dict[str, Tensor] = {}
    for key, entry in saved_metadata.items():
        kind, _, rest = key.partition("/")
        if kind == "rng":
            if rest == "cpu" or trainer.device.type == "cuda":
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            continue
        master = masters.get(rest if kind == "model" else rest.rpartition("/")[0])
        if master is None:
            raise CheckpointRefused(f"{path} is of another model: it has a tensor {key}")
        if kind == "model":
            if entry.size != master.shape:
                said = f"{rest} has shape {list(entry.size)}, the model {list(master.shape)}"
                raise CheckpointRefused(f"{path} is of another model: {said}")
            state[key] = master.detach()
        elif entry.size == master.shape:
            state[key] = torch.zeros_like(master, dtype=entry.properties.dtype).detach()
        else:
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=master.device)
    return state


def _restore_state(trainer: Trainer, state: Mapping[str, Tensor]) -> None:
    masters = dict(trainer.master_weights.named_parameters())
    kept: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith("optim/"):
            name, _, field = key.removeprefix("optim/").rpartition("/")
            kept.setdefault(name, {})[field] = value
    for name, master in masters.items():
        part = _find_optimizer(trainer, master)
        part.state.pop(master, None)
        if name in kept:
            part.state[master] = kept[name]
    trainer.master_weights.copy_to_model()
    torch.set_rng_state(state["rng/cpu"])
    if "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"], trainer.device)


@contextlib.contextmanager
def _translate_storage_errors(directory: Path) -> Iterator[None]:
    """A save that fails has a name of ours outside."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise _to_storage_error(error, directory) from error


def _to_storage_error(error: BaseException, directory: Path) -> RamifyError:
    """A failed save by name. Torch may hide the reason of a write that failed: then the room that is left tells."""
    first = _find_root_cause(error)
    known = to_storage_error(first, directory)
    if isinstance(known, RamifyError):
        return known
    free = shutil.disk_usage(directory).free
    failure = StorageFull if free < MIN_FREE_BYTES else StorageFailed
    return failure(f"{directory}: a checkpoint cannot be written: {first} ({free / 2**20:.1f} MiB free)")


def _find_root_cause(error: BaseException) -> BaseException:
    """What lies under a failure of DCP: the error of the disk if there is one."""
    found = [error]
    if isinstance(error, CheckpointException):
        found = [failure for failure, _ in error.failures.values()]
    for each in found:
        link: BaseException | None = each
        while link is not None:
            if is_disk_full(link):
                return link
            link = link.__cause__ or link.__context__
    return found[0]
