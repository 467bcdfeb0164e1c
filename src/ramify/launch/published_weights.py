"""The newest published weights of a run: a restarted engine serves them, and a finished run saves them."""

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from ramify.core.errors import WeightsRefused
from ramify.core.files import create_directory, remove_directory
from ramify.core.watchdog import watch_storage
from ramify.launch.head import read_local_state
from ramify.model.manifest import MANIFEST_FILE, Manifest
from ramify.orchestrate.config import RunConfig
from ramify.run.store import storage_call
from ramify.train.weights_directory import get_weights_directory, lock_directory, remove_stale_directories

SERVED_DIR = "served"
MAX_TRIES = 5  # the trainer may remove a version while it is being linked


def find_newest_weights(directory: Path) -> Path | None:
    """Return the directory of the last published version; None if there is none yet."""
    candidates: list[tuple[int, int, Path]] = []
    with watch_storage(directory):
        for manifest in directory.glob(f"*/{MANIFEST_FILE}"):
            try:
                version = Manifest.read(manifest.parent).version
            except WeightsRefused:
                continue  # the trainer has just removed it
            candidates.append((version.incarnation, version.step, manifest.parent))
    return max(candidates)[2] if candidates else None


def link_newest_weights(config: RunConfig, engine: str = "") -> Path | None:
    """Hard-link the newest weights, so that the trainer cannot remove them while an engine starts.

    `engine` is the name of the engine if there are several, which start at different times.

    Return the new directory; None if there are no weights.
    """
    directory, served_directory = config.weights_directory, get_served_directory(config) / engine
    for _ in range(MAX_TRIES):
        if (newest := find_newest_weights(directory)) is None:
            return None
        try:
            remove_directory(served_directory)
            with create_directory(served_directory / newest.name) as partial_path, watch_storage(newest):
                shutil.copytree(newest, partial_path, copy_function=os.link, dirs_exist_ok=True)
        except OSError:
            continue
        return served_directory / newest.name
    return None


def get_served_directory(config: RunConfig) -> Path:
    """Return the directory of the weights that engines are started with.

    In a shared directory it is named by the epoch of the head: a head that was replaced may still use its own.
    """
    if config.shared_path is None:
        return config.weights_directory / SERVED_DIR
    return config.weights_directory / f"{SERVED_DIR}-{_read_epoch(config)}"


def _read_epoch(config: RunConfig) -> int:
    state = read_local_state(config.path)
    return state.epoch if state is not None else 0


def _remove_directories(directories: Sequence[Path], print_line: Callable[[str], None]) -> None:
    """Remove directories that the run no longer needs. If that fails, print a line and go on."""
    for directory in directories:
        try:
            remove_directory(directory)
        except OSError as error:
            print_line(f"{directory} was not removed: {error}")


@contextlib.contextmanager
def hold_weights_directory(config: RunConfig, print_line: Callable[[str], None] = print) -> Generator[None]:
    """Lock the weights directory of a run, so that no other run removes it as stale.

    At the end, a directory in shared memory is removed, and so are the weights that engines were started with. Those
    of earlier heads are removed at the start: a lost head could not do so.
    """
    directory = config.weights_directory
    remove_stale_directories()
    if config.shared_path is not None:
        earlier = [directory / f"{SERVED_DIR}-{epoch}" for epoch in range(_read_epoch(config))]
        _remove_directories(earlier, print_line)
    try:
        with lock_directory(directory):
            yield
    finally:
        _remove_directories([get_served_directory(config)], print_line)
        remove_stale_directories()


def save_final_weights(config: RunConfig) -> None:
    """Copy the newest weights to disk, if they are in shared memory. Raises StorageFull or StorageFailed."""
    published = config.weights_directory
    newest = find_newest_weights(published)
    directory = get_weights_directory(config.path, "disk", config.shared_path)
    if newest is None or newest.parent == directory:
        return
    num_bytes = sum(file.stat().st_size for file in newest.rglob("*"))
    with storage_call(directory, num_bytes):
        _copy_weights(newest, directory)


def _copy_weights(newest: Path, directory: Path) -> None:
    """Copy a version of the weights into `directory`, unless it has them."""
    if not (directory / newest.name).exists():
        for unfinished in directory.glob(f".{newest.name}.*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        with create_directory(directory / newest.name) as partial_path:
            shutil.copytree(newest, partial_path, dirs_exist_ok=True)
