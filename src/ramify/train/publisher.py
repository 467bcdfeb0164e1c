"""Published weights for the engines: whole models in directories named by version.

`ramify.model.publish_weights` writes a version: safetensors, a manifest with checksums, the model's small files, and
one atomic rename. On one host the directory may be in shared memory (`transport = "shm"`). Engines on the trainer's GPU
may copy the trainer's own tensors instead (`transport = "ipc"`, `ramify.model.shared_weights`); the directory is then
written in the background. An engine may still be reading an older version, so versions are removed only when the
orchestrator, which knows the engines, no longer needs them.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ramify.core.errors import RamifyError, StorageFailed, StorageFull
from ramify.core.files import remove_directory
from ramify.core.watchdog import watch_storage
from ramify.model import publish_weights
from ramify.model.lora import is_adapter_weight, iter_base_weights, merge_adapter
from ramify.model.remote_weights import remove_uploaded_weights, upload_weights
from ramify.model.resolve import WEIGHTS_NAME_PATTERN
from ramify.model.shared_weights import SharedWeights, remove_announcements
from ramify.model.weights import get_untied_tensors
from ramify.model.weights_manifest import PublishedAdapters
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.run.store import storage_call, wrap_storage_errors
from ramify.trace import PolicyVersion
from ramify.train.distributed import Ranks, gather_full_tensor
from ramify.train.trainer import Trainer

_PARTIAL_PATTERN = re.compile(rf"\.({TOKEN_PATTERN})-\d{{6,}}\.")
MAX_WRITE_SHARE = 0.1  # of the time, for directories that follow an announcement: the ledger is on the same disk


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version that engines can load, and what publishing it took."""

    version: PolicyVersion
    path: Path
    seconds: float
    bytes: int


class WeightPublisher:
    """Publishes the weights of a trainer below `directory`, in `dtype`, as versions of `policy`.

    `base_model` is the model directory that the small files are copied from. `incarnation` is the trainer's: versions
    of a later one, which has replaced it, are never removed. If it `shares_memory`, every version is announced, so that
    engines copy it from the trainer's tensors, and `withdraw` must be called before these change; directories follow in
    the background: for every version if `write_every_version`, otherwise for as many as take a tenth of the time.
    `wait_until_copied` waits for these engines and returns which were too slow. The weights of several ranks are
    sharded, so they are not shared. If there is a `url`, every directory is copied there. If `adapters` is
    given, versions hold only the adapters; otherwise these are merged into the weights. `warn` receives one line for
    each failure that does not end the training.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        *,
        policy: str,
        base_model: Path,
        dtype: torch.dtype,
        incarnation: int = 0,
        shares_memory: bool = False,
        wait_until_copied: Callable[[PolicyVersion], str] = lambda version: "",
        write_every_version: bool = False,
        url: str | None = None,
        adapters: PublishedAdapters | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory, self.ranks, self.policy, self.incarnation = directory, ranks, policy, incarnation
        self.base_model, self.dtype, self.url, self._adapters = base_model, dtype, url, adapters
        self._warn, self._wait_until_copied, self._write_every_version = warn, wait_until_copied, write_every_version
        self._shares_memory = shares_memory and ranks.world_size == 1
        self._shared: SharedWeights | None = None
        self._executor = ThreadPoolExecutor(1, "publisher")
        self._directory_write: Future[None] | None = None
        self._next_write_time = 0.0
        self._announced: tuple[PolicyVersion, Path] | None = None
        self._written_version: PolicyVersion | None = None
        if ranks.is_first:
            remove_announcements(directory, incarnation)
        for partial_path in directory.glob(".*") if ranks.is_first else ():
            match = _PARTIAL_PATTERN.match(partial_path.name)
            if match is None or FencingToken.parse(match[1]).number <= incarnation:
                shutil.rmtree(partial_path, ignore_errors=True)

    def publish(self, trainer: Trainer, step: int) -> PublishedWeights:
        """Publish the weights after `step` steps. A collective: every rank must call it.

        Raises StorageFull or StorageFailed; with shared memory, also if an earlier version could not be written.
        """
        started = time.perf_counter()
        version = PolicyVersion(self.policy, self.incarnation, step)
        path = self.path_for(self.incarnation, step)
        with self.ranks.raise_together():
            if self._directory_write is not None and (self._write_every_version or self._directory_write.done()):
                self._join_write()
        with watch_storage(path):
            is_writer = self.ranks.is_first and not path.exists()
        tensors = self._gather_weights(trainer, is_writer=is_writer)
        with self.ranks.raise_together():
            if is_writer and self._shared is not None:
                with storage_call(self.directory):
                    self._shared.announce(version, path.name)
                self._announced = (version, path)
                is_due = self._write_every_version or time.monotonic() >= self._next_write_time
                if self._directory_write is None and is_due:
                    host_tensors = self._shared.start_host_copy()
                    self._directory_write = self._executor.submit(self._write_announced, path, host_tensors, version)
            elif is_writer:
                self._write(path, tensors, version)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return PublishedWeights(version, path, time.perf_counter() - started, size)

    def withdraw(self) -> None:
        """Withdraw the announced version, because the weights are about to change.

        Engines that copy them have time to finish; one that is slower has to load the version's directory.
        """
        if self._shared is None:
            return
        if (version := self._shared.announced_version) is not None and (problem := self._wait_until_copied(version)):
            self._warn(problem)
        with storage_call(self.directory):
            self._shared.withdraw()

    def write_last_directory(self) -> None:
        """Complete the directory of the last version, if it was only announced. A collective.

        Raises StorageFull or StorageFailed if the last version cannot be written.
        """
        with self.ranks.raise_together():
            if self._announced is not None and self._shared is not None:
                with contextlib.suppress(StorageFull, StorageFailed):  # of an older version
                    self._join_write()
                version, path = self._announced
                if version != self._written_version:
                    self._write_announced(path, self._shared.start_host_copy(), version)

    def _join_write(self) -> None:
        """Wait until nothing is written in the background. Raises the failure of that write."""
        write, self._directory_write = self._directory_write, None
        if write is not None:
            write.result()

    def _gather_weights(self, trainer: Trainer, *, is_writer: bool) -> Mapping[str, Tensor]:
        """Return the weights on the rank that writes them, in host memory or shared. A collective."""
        iter_weights = iter_merged_weights if self._adapters is None else iter_adapters
        weights = ((name, tensor.to(self.dtype)) for name, tensor in iter_weights(trainer))
        if self._shared is not None:
            self.withdraw()
            self._shared.copy_unshared_tensors(weights)
            return self._shared.tensors
        device = trainer.device if self._shares_memory else "cpu"
        tensors = {name: tensor.to(device) for name, tensor in weights if is_writer}
        if is_writer and self._shares_memory:
            try:
                with storage_call(self.directory):
                    self._shared = SharedWeights(tensors, trainer.policy.model, self.directory, self.incarnation)
            except RuntimeError as error:  # some drivers and virtual machines cannot share a GPU's memory
                self._warn(f"engines load all weights from {self.directory}: memory cannot be shared: {error}")
                self._shares_memory = False
                return {name: tensor.cpu() for name, tensor in tensors.items()}
        return tensors

    def _write_announced(self, path: Path, host_tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Write an announced version, which is being copied to host memory, to its directory."""
        assert self._shared is not None
        started = time.monotonic()
        self._shared.finish_host_copy()
        self._write(path, host_tensors, version)
        self._written_version = version
        self._next_write_time = started + (time.monotonic() - started) / MAX_WRITE_SHARE

    def _write(self, path: Path, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        with wrap_storage_errors(self.directory):
            publish_weights(path, tensors, version, base_model=self.base_model, adapters=self._adapters)
        if self.url is not None:
            upload_weights(path, self.url)

    def path_for(self, incarnation: int, step: int) -> Path:
        """Return the directory of a version."""
        return self.directory / f"{FencingToken.from_number(incarnation)}-{step:06}"

    def list_versions(self) -> list[PolicyVersion]:
        """Return the published versions, oldest first."""
        matches = (WEIGHTS_NAME_PATTERN.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        versions = [(FencingToken.parse(match[1]).number, int(match[2])) for match in matches if match]
        return sorted(PolicyVersion(self.policy, incarnation, step) for incarnation, step in versions)

    def prune(self, needed: Collection[PolicyVersion]) -> None:
        """Remove all versions but the needed ones and the newest.

        A version that cannot be removed is kept until the next call: training does not depend on it.
        """
        for version in self.list_versions()[:-1] if self.ranks.is_first else ():
            if version not in needed and version.incarnation <= self.incarnation:
                try:
                    self._remove(self.path_for(version.incarnation, version.step))
                except RamifyError as error:
                    self._warn(f"{error.name}: {error.message}; {version} is removed later")
                    return

    def remove_after(self, step: int) -> None:
        """Remove the versions of later steps: they are trained again, perhaps with other settings."""
        with self.ranks.raise_together():
            for version in self.list_versions() if self.ranks.is_first else ():
                if version.step > step:
                    self._remove(self.path_for(version.incarnation, version.step))

    def _remove(self, path: Path) -> None:
        """Remove a version. Its directory is removed last, because `prune` lists directories."""
        if self.url is not None:
            remove_uploaded_weights(path.name, self.url)
        with storage_call(self.directory):
            remove_directory(path)


def iter_adapters(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the adapters that the model computes with. Every rank must iterate to the end."""
    for name, tensor in get_untied_tensors(trainer.policy.model).items():
        yield name, gather_full_tensor(tensor.detach())


def iter_merged_weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the full weights by their names in the base model, with adapters merged.

    They are the tensors that the model computes with, so that engines compute with the same. The product of adapters is
    computed from their master weights. Every rank must iterate to the end, because a sharded weight is gathered when
    it is reached.
    """
    masters = trainer.master_weights
    adapters = {
        name.removeprefix("model."): gather_full_tensor(masters.to_float32(parameter)).to(trainer.device)
        for name, parameter in masters.named_parameters()
        if is_adapter_weight(name)
    }
    lora = trainer.config.lora
    with torch.no_grad():
        for name, tensor in iter_base_weights(trainer.policy.model):
            yield name, merge_adapter(name, gather_full_tensor(tensor), adapters, lora.alpha / lora.rank)
