"""Where batches come from: the trainer's side of its talk with the orchestrator, and a stand-in that reads a recording.

The trainer asks, the orchestrator answers; every question can be asked twice. `docs/training.md` has the protocol. One
idea carries it: a trainer is known by its incarnation, which the orchestrator gives to each new one, so one that lives
on while its successor works is told to go.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ramify.errors import BatchCorrupt, ConfigInvalid
from ramify.model.version import PolicyVersion
from ramify.store import wrap_storage_errors
from ramify.train.batches import Batch, Laying, decode, laid_again, shares
from ramify.train.protocol import Welcome

NAME = "step_{step:06}.rank_{rank}.batch"
_NAMED = re.compile(r"step_(\d{6,})\.rank_(\d+)\.batch")


class BatchSource(Protocol):
    """Who gives batches and takes note of what became of them. All ranks ask for batches; the first one speaks."""

    def hello(self, rank: int, ranks: int, laying: Laying, incarnation: int | None) -> Welcome:
        """Introduce this trainer; without an incarnation it is a new one and gets the next."""
        ...

    def batch(self, step: int, stopped: Callable[[], bool]) -> Batch | None:
        """This rank's share of the batch of `step`; None if there is none to come, or `stopped` turned true."""
        ...

    def trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Step `step` is done; whether a checkpoint is wanted right now."""
        ...

    def published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        """A version can be loaded; returns those that engines still need, None if nobody knows."""
        ...

    def checkpoint(self, step: int) -> None:
        """The checkpoint after `step` steps is in its place; when this returns it is the end of the history."""
        ...

    def close(self) -> None: ...


class Recording:
    """A directory of batches, one file for each step and rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, step: int, rank: int, data: bytes | memoryview, ranks: int) -> None:
        """Keep a share of so many as it came. Raises StorageFull or StorageFailed."""
        with wrap_storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            place = self.directory / NAME.format(step=step, rank=rank)
            aside = place.with_name(f".{place.name}")
            aside.write_bytes(data)
            aside.replace(place)
            for _, other, path in self._found(step) if rank == 0 else ():
                if other >= ranks:  # of a trainer that had more, whose step comes again
                    path.unlink()

    def steps(self) -> list[int]:
        """The steps that were recorded, rising."""
        return sorted({step for step, _, _ in self._found()})

    def shares(self, step: int) -> list[Batch]:
        """All shares of a step. Raises BatchCorrupt where they are not one whole batch."""
        found = [_read(path) for _, _, path in self._found(step)]
        there = Batch.of(step, [pack for share in found for pack in share.packs]).counts
        if any(share.counts.get(name, 0) != count for share in found for name, count in there.items()):
            said = f"the shares of step {step} hold {dict(there)} entries, its batch {dict(found[0].counts)}"
            raise BatchCorrupt(f"{self.directory}: {said}: one is missing, or they were recorded by different trainers")
        return found

    def _found(self, step: int | None = None) -> list[tuple[int, int, Path]]:
        """What lies there, of all steps or one, by step and rank."""
        pattern = NAME.format(step=step, rank="*") if step is not None else "step_*.batch"
        named = ((_NAMED.fullmatch(path.name), path) for path in self.directory.glob(pattern))
        return sorted((int(match[1]), int(match[2]), path) for match, path in named if match)


def _read(path: Path) -> Batch:
    try:
        return decode(path.read_bytes())
    except BatchCorrupt as error:
        raise BatchCorrupt(f"{path}: {error.message}") from error


class ReplaySource:
    """Recorded batches again, shared out over the ranks there are now; nothing is kept and nobody told."""

    def __init__(self, recording: Recording, *, flat: bool = False) -> None:
        self.recording, self.flat = recording, flat
        self.steps = recording.steps()
        if not self.steps:
            raise ConfigInvalid(f"--replay: {recording.directory} holds no recorded batches")
        missing = set(range(self.steps[0], self.steps[-1])) - set(self.steps)
        if missing:
            raise ConfigInvalid(f"--replay: {recording.directory} has no batch of step {min(missing)}")

    def hello(self, rank: int, ranks: int, laying: Laying, incarnation: int | None) -> Welcome:
        self.rank, self.ranks, self.laying = rank, ranks, laying
        return Welcome(committed=self.steps[0], policy="replay", steps=self.steps[-1] + 1)

    def batch(self, step: int, stopped: Callable[[], bool]) -> Batch | None:
        if step > self.steps[-1] or stopped():
            return None
        whole = laid_again(self.recording.shares(step), self.laying, flat=self.flat)
        return shares(whole, self.laying, self.ranks)[self.rank]

    def trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        return False

    def published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        return None

    def checkpoint(self, step: int) -> None: ...

    def close(self) -> None: ...
