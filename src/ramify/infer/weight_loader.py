"""Staging of published weights: from the buffer of the trainer that announced them, or from their directory."""

import time
from pathlib import Path
from typing import Any

from ramify.core.errors import DeadlineExceeded, WeightsReplaced
from ramify.model.remote_weights import fetch_weights
from ramify.model.weight_buffer import Announcement, BufferUnreadable, WeightBufferReader
from ramify.model.weights import StagedWeights, stage_weights
from ramify.model.weights_manifest import MANIFEST_FILE

DIRECTORY_TIMEOUT = 100.0  # seconds for an announced version to be written to its directory
POLL_INTERVAL = 0.05


class WeightLoader:
    """Stages published versions for one model. Those without a directory on this node are fetched from `url`.

    Without `read_buffers`, announced versions are read from their directories, too.
    """

    def __init__(self, module: Any, url: str | None = None, *, read_buffers: bool = True) -> None:
        self._module, self._url, self._read_buffers = module, url, read_buffers
        self._buffer_reader = WeightBufferReader()

    def stage(self, directory: Path, run: str = "") -> StagedWeights:
        """Read and verify the version of `directory` for the model, which is not changed; `run` is the id of its run.

        If the version is announced but its buffer cannot be read, as on another GPU or after the trainer has died, wait
        for the directory. Raises WeightsRefused, WeightsReplaced, DeadlineExceeded after DIRECTORY_TIMEOUT, or
        ProviderError if it cannot be fetched.
        """
        if self._url is not None and not directory.is_dir():
            directory = fetch_weights(directory.name, self._url, run)
        announcement = Announcement.read(directory)
        if announcement is None or ((directory / MANIFEST_FILE).is_file() and announcement.directory != directory.name):
            return stage_weights(directory, self._module)
        if announcement.directory != directory.name:
            raise _make_replaced_error(directory, announcement)
        reason = "this engine reads directories"
        if self._read_buffers:
            try:
                return self._buffer_reader.stage(announcement, self._module)
            except BufferUnreadable as error:
                reason = str(error)  # its traceback would keep a copy of the weights
        _wait_for_directory(directory, reason)
        return stage_weights(directory, self._module)


def _wait_for_directory(directory: Path, reason: str) -> None:
    """Wait until a version is written; `reason` says why its buffer is not used."""
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
    newer = f"{announcement.version} is announced now" if announcement else "its trainer was replaced"
    return WeightsReplaced(f"{directory} is not on disk, and {newer}" + (f"; {reason}" if reason else ""))
