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
from ramify.train.batch import Batch, PackSpec, decode_batch, repack, split_across_ranks
from ramify.train.protocol import RegisterReply

FILE_NAME = "step_{step:06}.rank_{rank}.batch"
_FILE_PATTERN = re.compile(r"step_(\d{6,})\.rank_(\d+)\.batch")


class BatchSource(Protocol):
    """Who gives batches and takes note of what became of them. All ranks ask for batches; the first one speaks."""

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        """Introduce this trainer; without an incarnation it is a new one and gets the next."""
        ...

    def get_batch(self, step: int, should_stop: Callable[[], bool]) -> Batch | None:
        """This rank's share of the batch of `step`; None if there is none to come, or `stopped` turned true."""
        ...

    def report_trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Step `step` is done; whether a checkpoint is wanted right now."""
        ...

    def report_published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        """A version can be loaded; returns those that engines still need, None if nobody knows."""
        ...

    def commit_checkpoint(self, step: int) -> None:
        """The checkpoint after `step` steps is in its place; when this returns it is the end of the history."""
        ...

    def close(self) -> None: ...


class BatchRecording:
    """A directory of batches, one file for each step and rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_share(self, step: int, rank: int, data: bytes | memoryview, world_size: int) -> None:
        """Keep a share of so many as it came. Raises StorageFull or StorageFailed."""
        with wrap_storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            place = self.directory / FILE_NAME.format(step=step, rank=rank)
            aside = place.with_name(f".{place.name}")
            aside.write_bytes(data)
            aside.replace(place)
            for _, other, path in self._list_files(step) if rank == 0 else ():
                if other >= world_size:  # of a trainer that had more, whose step comes again
                    path.unlink()

    def list_steps(self) -> list[int]:
        """The steps that were recorded, rising."""
        return sorted({step for step, _, _ in self._list_files()})

    def read_shares(self, step: int) -> list[Batch]:
        """All shares of a step. Raises BatchCorrupt where they are not one whole batch."""
        found = [_read_batch(path) for _, _, path in self._list_files(step)]
        there = Batch.from_packs(step, [pack for share in found for pack in share.packs]).entry_counts
        if any(share.entry_counts.get(name, 0) != count for share in found for name, count in there.items()):
            said = f"the shares of step {step} hold {dict(there)} entries, its batch {dict(found[0].entry_counts)}"
            raise BatchCorrupt(f"{self.directory}: {said}: one is missing, or they were recorded by different trainers")
        return found

    def _list_files(self, step: int | None = None) -> list[tuple[int, int, Path]]:
        """What lies there, of all steps or one, by step and rank."""
        pattern = FILE_NAME.format(step=step, rank="*") if step is not None else "step_*.batch"
        named = ((_FILE_PATTERN.fullmatch(path.name), path) for path in self.directory.glob(pattern))
        return sorted((int(match[1]), int(match[2]), path) for match, path in named if match)


def _read_batch(path: Path) -> Batch:
    try:
        return decode_batch(path.read_bytes())
    except BatchCorrupt as error:
        raise BatchCorrupt(f"{path}: {error.message}") from error


class ReplayBatchSource:
    """Recorded batches again, shared out over the ranks there are now; nothing is kept and nobody told."""

    def __init__(self, recording: BatchRecording, *, flat: bool = False) -> None:
        self.recording, self.flat = recording, flat
        self.steps = recording.list_steps()
        if not self.steps:
            raise ConfigInvalid(f"--replay: {recording.directory} holds no recorded batches")
        missing = set(range(self.steps[0], self.steps[-1])) - set(self.steps)
        if missing:
            raise ConfigInvalid(f"--replay: {recording.directory} has no batch of step {min(missing)}")

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        self.rank, self.world_size, self.pack_spec = rank, world_size, pack_spec
        return RegisterReply(committed=self.steps[0], policy="replay", steps=self.steps[-1] + 1)

    def get_batch(self, step: int, should_stop: Callable[[], bool]) -> Batch | None:
        if step > self.steps[-1] or should_stop():
            return None
        whole = repack(self.recording.read_shares(step), self.pack_spec, flat=self.flat)
        return split_across_ranks(whole, self.pack_spec, self.world_size)[self.rank]

    def report_trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        return False

    def report_published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        return None

    def commit_checkpoint(self, step: int) -> None: ...

    def close(self) -> None: ...
