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
from ramify.train.lora import is_adapter, merged, plain_name
from ramify.train.parallel import Ranks, whole
from ramify.train.step import Trainer

_NAME = re.compile(r"(\d+)-(\d{6,})")  # incarnation and step


@dataclass(frozen=True, slots=True)
class Published:
    """A version where engines can read it, and what it took."""

    version: PolicyVersion
    path: Path
    seconds: float
    bytes: int


class Publisher:
    """Publishes the weights of a trainer below one directory."""

    def __init__(self, directory: Path, ranks: Ranks, *, policy: str, base: Path, dtype: torch.dtype) -> None:
        self.directory, self.ranks, self.policy, self.base, self.dtype = directory, ranks, policy, base, dtype
        for half in directory.glob(".*") if ranks.first else ():
            shutil.rmtree(half, ignore_errors=True)

    def publish(self, trainer: Trainer, incarnation: int, step: int) -> Published:
        """Write the weights after `step` steps. Raises StorageFull or StorageFailed. Every rank must take part."""
        started = time.perf_counter()
        version = PolicyVersion(self.policy, incarnation, step)
        path = self.path(incarnation, step)
        wanted = self.ranks.first and not path.exists()
        tensors = {name: tensor.to(self.dtype).cpu() for name, tensor in gathered(trainer) if wanted}
        with self.ranks.together():
            if wanted:
                with wrap_storage_errors(self.directory):
                    publish_weights(path, tensors, version, base_model=self.base)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return Published(version, path, time.perf_counter() - started, size)

    def path(self, incarnation: int, step: int) -> Path:
        return self.directory / f"{incarnation}-{step:06}"

    def versions(self) -> list[PolicyVersion]:
        """What lies there, oldest first."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        return sorted(PolicyVersion(self.policy, int(match[1]), int(match[2])) for match in found if match)

    def prune(self, needed: Collection[PolicyVersion]) -> None:
        """Remove all versions but the needed ones and the newest."""
        for version in self.versions()[:-1] if self.ranks.first else ():
            if version not in needed:
                place = self.path(version.incarnation, version.step)
                gone = place.with_name(f".{place.name}.gone")
                place.rename(gone)  # nobody sees a part of it
                shutil.rmtree(gone, ignore_errors=True)


def gathered(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The whole weights by the names of the plain model, adapters merged, masters where there are any.

    Every rank must go through all of it: a weight that is spread over ranks is put together as it is reached.
    """
    masters = {name.removeprefix("model."): master.detach() for name, master in trainer.masters.named()}
    model = trainer.policy.model
    adapters = {name: whole(value) for name, value in masters.items() if is_adapter(name)}
    lora = trainer.config.lora
    with torch.no_grad():
        for name, tensor in get_untied_tensors(model).items():
            if not is_adapter(name):
                found = whole(masters.get(name, tensor.detach()))
                yield plain_name(name), merged(name, found, adapters, lora.alpha / lora.rank)
