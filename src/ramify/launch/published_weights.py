"""The newest weights of a run: what an engine that is started again should serve, and what a finished run leaves."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ramify.errors import WeightsRefused
from ramify.model.manifest import MANIFEST_FILE, Manifest
from ramify.orchestrate.config import RunConfig
from ramify.store import wrap_storage_errors
from ramify.train.weights_directory import get_weights_directory, lock_directory, remove_stale_directories

SERVED_DIR = "served"
MAX_TRIES = 5  # a version may be removed while it is looked at


def find_newest_weights(directory: Path) -> Path | None:
    """The last published version; None where there is none yet."""
    found: list[tuple[int, int, Path]] = []
    for place in directory.glob(f"*/{MANIFEST_FILE}"):
        try:
            version = Manifest.read(place.parent).version
        except WeightsRefused:
            continue  # removed while we looked
        found.append((version.incarnation, version.step, place.parent))
    return max(found)[2] if found else None


def link_newest_weights(directory: Path) -> Path | None:
    """The newest weights under a name of the engine's own, which nobody removes while it starts."""
    for _ in range(MAX_TRIES):
        if (found := find_newest_weights(directory)) is None:
            return None
        shutil.rmtree(directory / SERVED_DIR, ignore_errors=True)
        try:
            return Path(shutil.copytree(found, directory / SERVED_DIR / found.name, copy_function=os.link))
        except OSError:
            continue
    return None


@contextlib.contextmanager
def hold_weights_directory(config: RunConfig) -> Iterator[None]:
    """The run's weights while it lives: in shared memory they end with it."""
    directory = config.weights.directory_for(config.path)
    remove_stale_directories()
    try:
        with lock_directory(directory):
            yield
    finally:
        shutil.rmtree(directory / SERVED_DIR, ignore_errors=True)
        remove_stale_directories()


def save_final_weights(config: RunConfig) -> None:
    """A finished run leaves its weights on the disk, wherever they travelled. Raises StorageFull or StorageFailed."""
    found, kept = (
        find_newest_weights(config.weights.directory_for(config.path)),
        get_weights_directory(config.path, "disk"),
    )
    if found is None or found.parent == kept or (kept / found.name).exists():
        return
    part = kept / f".{found.name}"
    with wrap_storage_errors(kept):
        shutil.copytree(found, part, dirs_exist_ok=True)
        part.rename(kept / found.name)
