"""Staging of published weights: in the memory of the trainer that announced them, or from their directory."""

import time
from pathlib import Path
from typing import Any

from ramify.core.errors import DeadlineExceeded, WeightsReplaced
from ramify.model.remote_weights import fetch_weights
from ramify.model.shared_weights import Announcement, MemoryUnreadable, SharedWeightsReader
from ramify.model.weights import StagedWeights, stage_weights
from ramify.model.weights_manifest import MANIFEST_FILE

DIRECTORY_TIMEOUT = 100.0  # seconds for an announced version to be written to its directory
POLL_INTERVAL = 0.05


class WeightLoader:
    """Stages published versions for one model. Those without a directory on this node are fetched from `url`.

    Unless it `reads_memory`, announced versions are read from their directories, too.
    """

    def __init__(self, module: Any, url: str | None = None, *, reads_memory: bool = True) -> None:
        self._module, self._url = module, url
        self._directory_reason = "" if reads_memory else "this engine reads directories"
        self._memory_reader = SharedWeightsReader()

    def stage(self, directory: Path, run: str = "", *, directory_reason: str = "") -> StagedWeights:
        """Find the version of `directory` for the model, which is not changed; `run` is the id of its run.

        If the version is announced but the trainer's memory cannot be read, as on another GPU, after the trainer has
        died, or for a `directory_reason` that the caller knows, wait for the directory. Raises WeightsRefused,
        WeightsReplaced, DeadlineExceeded after DIRECTORY_TIMEOUT, or ProviderError if it cannot be fetched.
        """
        if self._url is not None and not directory.is_dir():
            directory = fetch_weights(directory.name, self._url, run)
        announcement = Announcement.read(directory)
        if announcement is None or ((directory / MANIFEST_FILE).is_file() and announcement.directory != directory.name):
            return stage_weights(directory, self._module)
        if announcement.directory != directory.name:
            raise _make_replaced_error(directory, announcement)
        reason = directory_reason or self._directory_reason
        if not reason:
            try:
                return self._memory_reader.stage(announcement, self._module)
            except MemoryUnreadable as error:
                reason = str(error)
        _wait_for_directory(directory, reason)
        return stage_weights(directory, self._module)

    def unmap_if_trainer_ended(self) -> None:
        """Free the memory of a trainer that has ended, as far as it is mapped here."""
        self._memory_reader.unmap_if_trainer_ended()


def _wait_for_directory(directory: Path, reason: str) -> None:
    """Wait until a version is written; `reason` says why the trainer's memory is not used."""
    deadline = time.monotonic() + DIRECTORY_TIMEOUT
    while not (directory / MANIFEST_FILE).is_file():
        announcement = Announcement.read(directory)
        if announcement is None or announcement.directory != directory.name:
            raise _make_replaced_error(directory, announcement, reason)
        if time.monotonic() > deadline:
            problem = f"was announced but not written within {DIRECTORY_TIMEOUT:g} s"
            raise DeadlineExceeded(f"{directory} {problem}; {reason}")
        time.sleep(POLL_INTERVAL)


def _make_replaced_error(directory: Path, announcement: Announcement | None, reason: str = "") -> WeightsReplaced:
    cause = f"{announcement.version} is announced now" if announcement else "its trainer was replaced"
    return WeightsReplaced(f"{directory} is not on disk, and {cause}" + (f"; {reason}" if reason else ""))
