"""Checkpoints: everything a run needs to continue exactly where it was.

A checkpoint is a directory written by torch's distributed checkpointing (DCP): all ranks write their shares at the same
time, and any number of ranks can load them. It is written under a temporary name and renamed when it is complete, and
checksums detect later damage (`checkpoint_manifest`). If the disk has no room, older checkpoints are removed, but never
the last one; if that does not help, the save raises StorageFull.
"""

import contextlib
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ramify.core.async_calls import map_in_daemon_threads
from ramify.core.errors import CheckpointRefused, RamifyError, StorageFailed, StorageFull
from ramify.core.files import fsync_path, get_free_bytes, mkdir_and_fsync, remove_directory
from ramify.core.watchdog import watch_storage
from ramify.run.fencing.token import FencingToken
from ramify.run.store.run_writer import is_disk_full, to_storage_error
from ramify.train.checkpoint_manifest import (
    MANIFEST_FILE,
    CheckpointManifest,
    FileRecord,
    SavedOptimizer,
    checksum_files,
    compute_manifest_digest,
    find_committed_checkpoint,
    find_intact_step,
    get_checkpoint_step,
    get_step_directory,
    list_checkpoints,
    list_saved_steps,
    parse_checkpoint_name,
    verify_checkpoint,
)
from ramify.train.checkpoint_metadata import METADATA_FILE, MetadataReader, StorageInfo
from ramify.train.config import CheckpointConfig
from ramify.train.distributed import Ranks
from ramify.train.trainer import Trainer

MAX_FILES, MIN_FILE_BYTES = 8, 256 << 20  # of a rank in a checkpoint; they are written at once
MIN_FREE_BYTES = 16 << 20  # a disk with less free space counts as full

T = TypeVar("T")


class CheckpointManager:
    """Saves, loads and removes the checkpoints of a run in `directory`.

    All ranks save and load together; only the first rank renames and removes. `token` is the trainer's fencing token,
    which other copies of it do not have: it is part of the names of its checkpoints, and checkpoints with a higher one
    are never removed. A run without a ledger has no token. `warn` receives lines for the log.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        *,
        token: FencingToken | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.directory, self.ranks, self.token, self.warn = directory, ranks, token, warn

    def list_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in rising order."""
        return list_saved_steps(self.directory)

    def path_for(self, step: int) -> Path:
        """Return the directory to which this trainer saves the checkpoint of a step."""
        return get_step_directory(self.directory, step, self.token)

    def save(
        self,
        trainer: Trainer,
        step: int,
        note: Mapping[str, Any] | None = None,
        *,
        committed: int = 0,
        reserved_bytes: int = 0,
    ) -> Path:
        """Save the trainer's state after `step` steps, and a note that `load` returns.

        If the disk has no room beside `reserved_bytes`, the checkpoints before `committed`, the last committed one, are
        removed; 0 if none is. Raises StorageFull or StorageFailed; the last committed checkpoint is unchanged.
        """
        path = self.path_for(step)
        with watch_storage(path):
            is_saved = (path / MANIFEST_FILE).exists()
        if self.ranks.broadcast(is_saved):
            return path  # nobody else uses this name
        try:
            self._write(trainer, path, step, note, reserved_bytes)
        except StorageFull as error:
            if not self.ranks.broadcast(any(saved < committed for saved in self.list_steps())):
                raise
            self.warn(f"{error.message}; checkpoints before step {committed} are removed to make room")
            self.remove_before(committed, CheckpointConfig(keep_last=1), {})
            self._write(trainer, path, step, note, reserved_bytes)
        return path

    def _write(
        self, trainer: Trainer, path: Path, step: int, note: Mapping[str, Any] | None, reserved_bytes: int
    ) -> None:
        """Write a checkpoint to `path`. If that fails, remove what was written."""
        partial_path = path.with_name(f".{path.name}.partial")
        needed_bytes = sum(self.ranks.all_gather(_count_state_bytes(trainer))) + reserved_bytes
        try:
            with self.ranks.raise_together(), _translate_storage_errors(self.directory), watch_storage(self.directory):
                if self.ranks.is_first:
                    self.remove_partial()
                    if path.exists():  # without its manifest it is incomplete: replace it
                        remove_directory(path)
                    mkdir_and_fsync(self.directory)
                    self._check_room(needed_bytes)
                    partial_path.mkdir()
            records: dict[str, FileRecord] = {}
            with self.ranks.raise_together(), _translate_storage_errors(self.directory):
                writer = _TensorWriter(partial_path)
                with ignore_single_process_warning(), watch_storage(path, needed_bytes):
                    state, planner = dict(_iter_state_tensors(trainer)), _SavePlanner(trainer)
                    is_alone = self.ranks.world_size == 1
                    state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=is_alone)
                records = checksum_files(sorted(partial_path.glob(f"__{self.ranks.rank}_*")))
            collected = {name: record for share in self.ranks.all_gather(records) for name, record in share.items()}
            with self.ranks.raise_together(), _translate_storage_errors(self.directory):
                if self.ranks.is_first:
                    files = {**checksum_files([partial_path / METADATA_FILE]), **collected}
                    if unexpected := sorted({file.name for file in partial_path.iterdir()} ^ set(files)):
                        problem = f"missing or without a checksum: {', '.join(unexpected)}"
                        raise StorageFailed(f"{partial_path} should hold {', '.join(sorted(files))}; {problem}")
                    optimizer = _describe_optimizer(trainer)
                    manifest = CheckpointManifest(step=step, optimizer=optimizer, note=dict(note or {}), files=files)
                    manifest.write(partial_path)
                    with watch_storage(path):
                        partial_path.rename(path)
                    fsync_path(self.directory)
        except RamifyError:
            if self.ranks.is_first:
                shutil.rmtree(partial_path, ignore_errors=True)
            raise

    def _check_room(self, needed_bytes: int) -> None:
        """Raise StorageFull if the disk has no room: a save that fills it would fail the other writers of the run."""
        if (free := get_free_bytes(self.directory)) is not None and free < needed_bytes:
            sizes = f"{needed_bytes / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free"
            raise StorageFull(f"{self.directory} has no room for a checkpoint: {sizes}")

    def load(self, trainer: Trainer, step: int, *, name: str = "", digest: str = "") -> dict[str, Any]:
        """Restore the trainer's state after `step` steps; returns the note.

        `name` and `digest` come from the commit; without a name, the newest checkpoint of the step is loaded. Every
        file is verified before anything is read. Raises CheckpointRefused, on all ranks.
        """
        path, ranks = find_committed_checkpoint(self.directory, step, name), self.ranks
        manifest = self._read_or_suggest(
            step, lambda: _verify_digest(path, digest, rank=ranks.rank, world_size=ranks.world_size)
        )
        reader = self._read_or_suggest(step, lambda: MetadataReader(path))
        state: dict[str, Tensor] = {}
        with ranks.raise_together():
            if manifest.optimizer != (optimizer := _describe_optimizer(trainer)):
                raise CheckpointRefused(f"{path} was written by {manifest.optimizer}, this run has {optimizer}")
            state = _allocate_state(trainer, reader.metadata.state_dict_metadata, path)
        try:
            num_bytes = sum(record.bytes for record in manifest.files.values())
            with ignore_single_process_warning(), watch_storage(path, num_bytes):
                planner = _LoadPlanner(trainer)
                state_dict_loader.load(state, storage_reader=reader, planner=planner, no_dist=ranks.world_size == 1)
        except CheckpointException as error:
            problem = f"{path} cannot be read: {_find_root_cause(error)}"
            raise CheckpointRefused(f"{problem}; {self._suggest_recovery(step)}") from error
        _restore_state(trainer, state)
        return manifest.note

    def read_note(self, step: int) -> dict[str, Any]:
        """Return the note that was saved with the checkpoint of `step`. Raises CheckpointRefused."""
        path = find_committed_checkpoint(self.directory, step)
        return self._read_or_suggest(step, lambda: CheckpointManifest.read(path)).note

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
        intact = self.ranks.call_on_first(lambda: find_intact_step(self.directory, step))
        if intact is None:
            return "no other checkpoint is intact: restore its files from a copy, or start a new run"
        command = f"ramify rollback {shlex.quote(str(self.directory.parent))} {intact}"
        path = find_committed_checkpoint(self.directory, intact)
        return f"the newest intact checkpoint is {path}: '{command}' makes the run continue from there"

    def remove_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which never became part of the run's history, and unfinished ones."""
        self._remove(lambda saved_step: saved_step > step)
        if self.ranks.is_first:
            self.remove_partial()

    def remove_before(self, step: int, config: CheckpointConfig, values: Mapping[int, float]) -> None:
        """Remove checkpoints before `step`, which is committed, but those that `config` keeps.

        `values` are the values of `config.keep_best`. Later steps do not count: a replaced trainer may have saved one.
        """
        saved_steps = [saved_step for saved_step in self.list_steps() if saved_step <= step]
        kept_steps = config.choose_kept_steps(saved_steps, values)
        self._remove(lambda saved_step: saved_step < step and saved_step not in kept_steps)

    def remove_partial(self) -> None:
        """Remove what interrupted saves and removals left behind."""
        for path in self.directory.glob(".step_*.partial"):
            if self._may_remove(path.name.removeprefix(".").split(".gone")[0].removesuffix(".partial")):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, is_obsolete: Callable[[int], bool]) -> None:
        """Remove the checkpoints of obsolete steps, on the first rank."""
        for path in list_checkpoints(self.directory) if self.ranks.is_first else ():
            is_saved = (path / MANIFEST_FILE).exists()
            if is_saved and is_obsolete(get_checkpoint_step(path)) and self._may_remove(path.name):
                remove_directory(path)
        self.ranks.barrier()

    def _may_remove(self, name: str) -> bool:
        """Return whether a checkpoint belongs to this trainer or an earlier one; a newer trainer's must stay."""
        parsed = parse_checkpoint_name(name)
        return self.token is None or parsed is None or parsed[1] <= self.token


def _verify_digest(path: Path, digest: str, *, rank: int, world_size: int) -> CheckpointManifest:
    """Verify a checkpoint, and that it is the one that was committed with this digest, if there is one."""
    manifest = verify_checkpoint(path, rank=rank, world_size=world_size)
    if digest and compute_manifest_digest(path) != digest:
        raise CheckpointRefused(f"{path} is not the checkpoint that was committed: its manifest has another digest")
    return manifest


@contextlib.contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """Suppress torch's warning about saving or loading without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _describe_optimizer(trainer: Trainer) -> str:
    optim = trainer.config.optim
    return SavedOptimizer(optim.type, optim.moments).name


def _iter_state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Iterate over everything that steps change, by keys that do not depend on the number of ranks.

    A split master weight is represented by a float32 tensor of its shape that takes no memory: `_SavePlanner` and
    `_LoadPlanner` join and split the weights one by one.
    """
    states = {item: state for optimizer in trainer.optimizer.optimizers for item, state in optimizer.state.items()}
    for name, parameter in trainer.master_weights.named_parameters():
        yield f"model/{name}", _get_placeholder(trainer, parameter)
        for field, value in states.get(parameter, {}).items():
            yield f"optim/{name}/{field}", value
    yield "rng/cpu", torch.get_rng_state()
    if trainer.device.type == "cuda":
        yield "rng/cuda", torch.cuda.get_rng_state(trainer.device)


def _get_placeholder(trainer: Trainer, parameter: nn.Parameter) -> Tensor:
    """Return a float32 tensor of the parameter's shape: the parameter itself, unless it is split."""
    is_split = trainer.master_weights.get_remainder(parameter) is not None
    return torch.zeros(()).expand(parameter.shape) if is_split else parameter.detach()


class _SavePlanner(DefaultSavePlanner):
    """Joins each split master weight when it is written."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._masters, self._split = trainer.master_weights, _index_split_weights(trainer)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object to write."""
        parameter = self._split.get(index.fqn)
        return super().lookup_object(index) if parameter is None else self._masters.to_float32(parameter)


class _LoadPlanner(DefaultLoadPlanner):
    """Splits each part of a master weight when it has been read."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._masters, self._split = trainer.master_weights, _index_split_weights(trainer)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor to read into."""
        is_split = read_item.dest_index.fqn in self._split
        return torch.empty(read_item.lengths) if is_split else super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Store what has been read."""
        parameter = self._split.get(read_item.dest_index.fqn)
        if parameter is not None:
            bounds = zip(read_item.dest_offsets, read_item.lengths)
            self._masters.set_float32(parameter, tuple(slice(start, start + size) for start, size in bounds), tensor)


class _TensorWriter(FileSystemWriter):
    """Writes tensors to a few files at once, into each one tensor after the other.

    Torch's writer keeps all tensors in host memory until its file is closed.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of this rank."""
        prefix: Any = plan.storage_data
        num_bytes = sum(item.tensor_storage_size() or 0 for item in plan.items)
        num_files = max(1, min(MAX_FILES, num_bytes // MIN_FILE_BYTES))

        def write_file(number: int) -> list[WriteResult]:
            path, results = Path(self.path) / f"{prefix.prefix}{number}.distcp", list[WriteResult]()
            with path.open("wb") as file:
                for item in plan.items[number::num_files]:
                    tensor: Any = planner.resolve_data(item)
                    start = file.tell()
                    torch.save(_copy_to_host(tensor.detach()), file)
                    length = file.tell() - start
                    results.append(WriteResult(item.index, length, StorageInfo(path.name, start, length)))
                file.flush()
                os.fsync(file.fileno())
            return results

        results = map_in_daemon_threads(write_file, range(num_files), max_threads=MAX_FILES)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for share in results for result in share])
        return future


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the host. A view is copied: it would be saved with all of its base."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _index_split_weights(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Return the parameters of split master weights by their keys in a checkpoint."""
    masters = trainer.master_weights
    return {
        f"model/{name}": parameter
        for name, parameter in masters.named_parameters()
        if masters.get_remainder(parameter) is not None
    }


def _count_state_bytes(trainer: Trainer) -> int:
    """Return the bytes that this rank writes to a checkpoint."""
    tensors = (value.to_local() if isinstance(value, DTensor) else value for _, value in _iter_state_tensors(trainer))
    return sum(tensor.nbytes for tensor in tensors)


def _allocate_state(trainer: Trainer, saved_metadata: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return tensors to load into: the master weights themselves, and new ones for the optimizer's state."""
    parameters = dict(trainer.master_weights.named_parameters())
    saved_names = {key.removeprefix("model/") for key in saved_metadata if key.startswith("model/")}
    if differing := sorted(saved_names ^ set(parameters)):
        raise CheckpointRefused(f"{path} is of another model: {len(differing)} weights differ, such as {differing[0]}")
    state: dict[str, Tensor] = {}
    for key, entry in saved_metadata.items():
        kind, _, name = key.partition("/")
        if kind == "rng":
            if name == "cpu" or trainer.device.type == "cuda":
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            continue
        parameter = parameters.get(name if kind == "model" else name.rpartition("/")[0])
        if parameter is None:
            raise CheckpointRefused(f"{path} is of another model: it has a tensor {key}")
        if kind == "model":
            if entry.size != parameter.shape:
                shapes = f"{name} has shape {list(entry.size)}, the model {list(parameter.shape)}"
                raise CheckpointRefused(f"{path} is of another model: {shapes}")
            state[key] = _get_placeholder(trainer, parameter)
        elif entry.size == parameter.shape:
            state[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype).detach()
        else:
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
    return state


def _restore_state(trainer: Trainer, state: Mapping[str, Tensor]) -> None:
    """Give loaded tensors to the optimizers and the random number generators."""
    parameters = dict(trainer.master_weights.named_parameters())
    optimizer_states: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith("optim/"):
            name, _, field = key.removeprefix("optim/").rpartition("/")
            optimizer_states.setdefault(parameters[name], {})[field] = value
    for optimizer in trainer.optimizer.optimizers:
        optimizer.state.clear()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        optimizer.state.update({param: optimizer_states[param] for param in params if param in optimizer_states})
    torch.set_rng_state(state["rng/cpu"])
    if "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"], trainer.device)


@contextlib.contextmanager
def _translate_storage_errors(directory: Path) -> Iterator[None]:
    """Raise StorageFull or StorageFailed in place of the errors of the disk and of DCP."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = _find_root_cause(error)
        known = to_storage_error(cause, directory)
        if isinstance(known, RamifyError):
            raise known from error
        free = shutil.disk_usage(directory).free  # torch may hide the cause; then the free space decides
        failure = StorageFull if free < MIN_FREE_BYTES else StorageFailed
        problem = f"a checkpoint cannot be written: {cause} ({free / 2**20:.1f} MiB free)"
        raise failure(f"{directory}: {problem}") from error


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the cause of a failure in DCP: an error for a full disk if there is one, else the first failure."""
    failures = [error]
    if isinstance(error, CheckpointException):
        failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        cause: BaseException | None = failure
        while cause is not None:
            if is_disk_full(cause):
                return cause
            cause = cause.__cause__ or cause.__context__
    return failures[0]
