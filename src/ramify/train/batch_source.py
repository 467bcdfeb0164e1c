"""The source of a trainer's batches: the interface, recordings of batches, and their replay.

The trainer calls, the orchestrator replies, and every call may be repeated; `docs/trainer.md` describes the protocol.
A trainer is known by its incarnation, a number that the orchestrator gives to each new one, so that a trainer that has
been replaced is refused.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ramify.core.errors import ConfigInvalid, DataCorrupt
from ramify.core.files import write_atomically
from ramify.run.store import storage_call
from ramify.trace.version import PolicyVersion
from ramify.train.batch import Batch, PackSpec, count_entries, repack, split_across_ranks
from ramify.train.batch_codec import decode_batch
from ramify.train.protocol import RegisterReply

FILE_NAME = "step_{step:06}.rank_{rank}.batch"
_FILE_PATTERN = re.compile(r"step_(\d{6,})\.rank_(\d+)\.batch")


class BatchSource(Protocol):
    """Gives batches to the trainer and records what became of them.

    Every rank registers and asks for batches; only rank 0 reports. By default reports are ignored.
    """

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        """Register a rank of this trainer; without an incarnation the trainer is new and gets the next one."""
        ...

    def get_batch(self, step: int) -> Batch | None:
        """Return this rank's share of the batch of `step`; None after the last one, or if the trainer is to stop."""
        ...

    def report_trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Report that `step` is done; returns whether to save a checkpoint now."""
        return False

    def report_published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        """Report that a version can be loaded; returns those that engines still need, None if unknown."""
        return None

    def wait_until_copied(self, version: PolicyVersion) -> str:
        """Wait until no engine copies a version from the trainer's memory; returns which have not done so in time."""
        return ""

    def commit_checkpoint(self, step: int, directory: str, digest: str) -> Mapping[int, float]:
        """Report that the checkpoint after `step` steps is complete; it is the end of the history on return.

        Returns the values of the metric `checkpoint.keep_best` by step.
        """
        return {}

    def report_unsaved(self, step: int, message: str) -> None:
        """Report that the disk had no room for the checkpoint after `step` steps."""

    def close(self) -> None:
        """Release connections."""


class BatchRecording:
    """A directory of batches, one file for each step and rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_share(self, step: int, rank: int, data: bytes | memoryview, world_size: int) -> None:
        """Store one rank's share unchanged, and delete shares of ranks that no longer exist.

        Raises StorageFull or StorageFailed.
        """
        with storage_call(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / FILE_NAME.format(step=step, rank=rank), data)
            for _, other_rank, other_path in self._list_files(step) if rank == 0 else ():
                if other_rank >= world_size:  # from an earlier trainer with more ranks, which ran this step before
                    other_path.unlink()

    def list_steps(self) -> list[int]:
        """Return the recorded steps, in rising order."""
        return sorted({step for step, _, _ in self._list_files()})

    def read_shares(self, step: int) -> list[Batch]:
        """Read all shares of a step. Raises DataCorrupt if they do not add up to one batch."""
        shares = [_read_batch(path) for _, _, path in self._list_files(step)]
        counts = count_entries([pack for share in shares for pack in share.packs])
        if any(share.entry_counts.get(name, 0) != count for share in shares for name, count in counts.items()):
            expected = dict(shares[0].entry_counts)
            problem = f"the shares of step {step} hold {counts} entries, its batch {expected}"
            reason = "one is missing, or they were recorded by different trainers"
            raise DataCorrupt(f"{self.directory}: {problem}: {reason}")
        return shares

    def _list_files(self, step: int | None = None) -> list[tuple[int, int, Path]]:
        """Return (step, rank, path) of all files, or only of one step's, in this order."""
        pattern = FILE_NAME.format(step=step, rank="*") if step is not None else "step_*.batch"
        matches = ((_FILE_PATTERN.fullmatch(path.name), path) for path in self.directory.glob(pattern))
        return sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)


def _read_batch(path: Path) -> Batch:
    try:
        return decode_batch(path.read_bytes())
    except DataCorrupt as error:
        raise DataCorrupt(f"{path}: {error.message}") from error


class ReplayBatchSource(BatchSource):
    """A `BatchSource` that replays a recording, split across the ranks there are now; reports are ignored.

    If `flat`, the batches are repacked without shared prefixes. Raises ConfigInvalid if a step is missing.
    """

    def __init__(self, recording: BatchRecording, *, flat: bool = False) -> None:
        self.recording, self.flat = recording, flat
        self.steps = recording.list_steps()
        if not self.steps:
            raise ConfigInvalid(f"--replay: {recording.directory} holds no recorded batches")
        missing = set(range(self.steps[0], self.steps[-1])) - set(self.steps)
        if missing:
            raise ConfigInvalid(f"--replay: {recording.directory} has no batch of step {min(missing)}")

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        """Record the rank and its pack layout, and return the range of recorded steps."""
        self.rank, self.world_size, self.pack_spec = rank, world_size, pack_spec
        return RegisterReply(committed=self.steps[0], policy="replay", steps=self.steps[-1] + 1)

    def get_batch(self, step: int) -> Batch | None:
        """Return the share of a recorded batch for this rank; None after the last one."""
        if step > self.steps[-1]:
            return None
        batch = repack(self.recording.read_shares(step), self.pack_spec, flat=self.flat)
        return split_across_ranks(batch, self.pack_spec, self.world_size)[self.rank]
