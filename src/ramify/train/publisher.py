"""New weights for the engines: whole models under a version's name, merged, verified, removed when nobody needs them.

A version is the directory that `ramify.model.publish` writes: safetensors, a manifest with checksums, the model's own
small files, one atomic rename. On one host it may lie in shared memory (`transport = "shm"`): the same files, read at
the speed of memory. An engine may still be reading an older version, so versions go only when the orchestrator, who
knows the engines, says which ones are needed.
"""

import re
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ramify.model import PolicyVersion, publish_weights
from ramify.model.weights import get_untied_tensors
from ramify.store import wrap_storage_errors
from ramify.train.distributed import Ranks, gather_full_tensor
from ramify.train.lora import is_adapter_weight, merge_adapter, strip_base_layer_suffix
from ramify.train.trainer import Trainer

_VERSION_PATTERN = re.compile(r"(\d+)-(\d{6,})")  # incarnation and step


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version where engines can read it, and what it took."""

    version: PolicyVersion
    path: Path
    seconds: float
    bytes: int


class WeightPublisher:
    """Publishes the weights of a trainer below one directory."""

    def __init__(self, directory: Path, ranks: Ranks, *, policy: str, base_model: Path, dtype: torch.dtype) -> None:
        self.directory, self.ranks, self.policy, self.base_model, self.dtype = (
            directory,
            ranks,
            policy,
            base_model,
            dtype,
        )
        for half in directory.glob(".*") if ranks.is_first else ():
            shutil.rmtree(half, ignore_errors=True)

    def publish(self, trainer: Trainer, incarnation: int, step: int) -> PublishedWeights:
        """Write the weights after `step` steps. Raises StorageFull or StorageFailed. Every rank must take part."""
        started = time.perf_counter()
        version = PolicyVersion(self.policy, incarnation, step)
        path = self.path_for(incarnation, step)
        wanted = self.ranks.is_first and not path.exists()
        tensors = {name: tensor.to(self.dtype).cpu() for name, tensor in iter_merged_weights(trainer) if wanted}
        with self.ranks.raise_together():
            if wanted:
                with wrap_storage_errors(self.directory):
                    publish_weights(path, tensors, version, base_model=self.base_model)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return PublishedWeights(version, path, time.perf_counter() - started, size)

    def path_for(self, incarnation: int, step: int) -> Path:
        return self.directory / f"{incarnation}-{step:06}"

    def list_versions(self) -> list[PolicyVersion]:
        """What lies there, oldest first."""
        found = (_VERSION_PATTERN.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        return sorted(PolicyVersion(self.policy, int(match[1]), int(match[2])) for match in found if match)

    def prune(self, needed: Collection[PolicyVersion]) -> None:
        """Remove all versions but the needed ones and the newest."""
        for version in self.list_versions()[:-1] if self.ranks.is_first else ():
            if version not in needed:
                place = self.path_for(version.incarnation, version.step)
                gone = place.with_name(f".{place.name}.gone")
                place.rename(gone)  # nobody sees a part of it
                shutil.rmtree(gone, ignore_errors=True)


def iter_merged_weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The whole weights by the names of the plain model, adapters merged, masters where there are any.

    Every rank must go through all of it: a weight that is spread over ranks is put together as it is reached.
    """
    masters = {
        name.removeprefix("model."): master.detach() for name, master in trainer.master_weights.named_parameters()
    }
    model = trainer.policy.model
    adapters = {name: gather_full_tensor(value) for name, value in masters.items() if is_adapter_weight(name)}
    lora = trainer.config.lora
    with torch.no_grad():
        for name, tensor in get_untied_tensors(model).items():
            if not is_adapter_weight(name):
                found = gather_full_tensor(masters.get(name, tensor.detach()))
                yield strip_base_layer_suffix(name), merge_adapter(name, found, adapters, lora.alpha / lora.rank)
