"""Published weights for the engines: whole models in directories named by version.

`ramify.model.publish_weights` writes a version: safetensors, a manifest with checksums, the model's small files, and
one atomic rename. On one host the directory may be in shared memory (`transport = "shm"`). An engine may still be
reading an older version, so versions are removed only when the orchestrator, which knows the engines, no longer needs
them.
"""

import re
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ramify.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.files import remove_directory
from ramify.model import publish_weights
from ramify.model.weights import get_untied_tensors
from ramify.store import wrap_storage_errors
from ramify.trace import PolicyVersion
from ramify.train.distributed import Ranks, gather_full_tensor
from ramify.train.lora import BASE_LAYER_SUFFIX, is_adapter_weight, merge_adapter
from ramify.train.trainer import Trainer

_VERSION_PATTERN = re.compile(rf"({TOKEN_PATTERN})-(\d{{6,}})")  # the trainer's token, and the step
_PARTIAL_PATTERN = re.compile(rf"\.({TOKEN_PATTERN})-\d{{6,}}\.")


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version that engines can load, and what publishing it took."""

    version: PolicyVersion
    path: Path
    seconds: float
    bytes: int


class WeightPublisher:
    """Publishes the weights of a trainer below `directory`, in `dtype`, as versions of `policy`.

    `base_model` is the model directory that the small files are copied from. `incarnation` is that of the trainer:
    versions of a later one, which has replaced it, are never removed.
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
    ) -> None:
        self.directory, self.ranks, self.policy, self.incarnation = directory, ranks, policy, incarnation
        self.base_model, self.dtype = base_model, dtype
        for partial_path in directory.glob(".*") if ranks.is_first else ():
            match = _PARTIAL_PATTERN.match(partial_path.name)
            if match is None or FencingToken.parse(match[1]).number <= incarnation:
                shutil.rmtree(partial_path, ignore_errors=True)

    def publish(self, trainer: Trainer, incarnation: int, step: int) -> PublishedWeights:
        """Write the weights after `step` steps. A collective: every rank must call it.

        Raises StorageFull or StorageFailed.
        """
        started = time.perf_counter()
        version = PolicyVersion(self.policy, incarnation, step)
        path = self.path_for(incarnation, step)
        is_writer = self.ranks.is_first and not path.exists()
        tensors = {name: tensor.to(self.dtype).cpu() for name, tensor in iter_merged_weights(trainer) if is_writer}
        with self.ranks.raise_together():
            if is_writer:
                with wrap_storage_errors(self.directory):
                    publish_weights(path, tensors, version, base_model=self.base_model)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return PublishedWeights(version, path, time.perf_counter() - started, size)

    def path_for(self, incarnation: int, step: int) -> Path:
        """Return the directory of a version."""
        return self.directory / f"{FencingToken.from_number(incarnation)}-{step:06}"

    def list_versions(self) -> list[PolicyVersion]:
        """Return the published versions, oldest first."""
        matches = (_VERSION_PATTERN.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        versions = [(FencingToken.parse(match[1]).number, int(match[2])) for match in matches if match]
        return sorted(PolicyVersion(self.policy, incarnation, step) for incarnation, step in versions)

    def prune(self, needed: Collection[PolicyVersion]) -> None:
        """Remove all versions but the needed ones and the newest."""
        for version in self.list_versions()[:-1] if self.ranks.is_first else ():
            if version not in needed and version.incarnation <= self.incarnation:
                remove_directory(self.path_for(version.incarnation, version.step))


def iter_merged_weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the full weights by their names in the base model, with adapters merged.

    Master weights are used where there are any. Every rank must iterate to the end, because a sharded weight is
    gathered when it is reached.
    """
    masters = {
        name.removeprefix("model."): master.detach() for name, master in trainer.master_weights.named_parameters()
    }
    adapters = {name: gather_full_tensor(value) for name, value in masters.items() if is_adapter_weight(name)}
    lora = trainer.config.lora
    with torch.no_grad():
        for name, tensor in get_untied_tensors(trainer.policy.model).items():
            if not is_adapter_weight(name):
                matrix = gather_full_tensor(masters.get(name, tensor.detach()))
                base_name = name.replace(BASE_LAYER_SUFFIX, "")  # the name it had before it got an adapter
                yield base_name, merge_adapter(name, matrix, adapters, lora.alpha / lora.rank)
