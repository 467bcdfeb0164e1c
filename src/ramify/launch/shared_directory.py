"""The shared directory of a run: storage that all its nodes reach.

Processes on other nodes cannot see the run directory, which is on the disk of the head. So checkpoints, weights,
images and token stats are written to the shared directory, and the run directory has links to them: a command that is
given the run directory finds everything in it.
"""

from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.core.watchdog import watch_storage
from ramify.run.store import storage_call
from ramify.run.store.image_store import MEDIA_DIR
from ramify.run.store.run_directory import move_aside
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR
from ramify.train.token_stats import TOKEN_STATS_DIR
from ramify.train.weights_directory import WEIGHTS_DIR

SHARED_SUBDIRECTORIES = (CHECKPOINTS_DIR, WEIGHTS_DIR, MEDIA_DIR, TOKEN_STATS_DIR)


def check_shared_parent(directory: Path) -> None:
    """Raise ConfigInvalid if not even the parent of `cluster.shared_directory` exists: its storage is not mounted."""
    parent = directory.absolute().parent
    with watch_storage(parent):
        is_mounted = parent.is_dir()
    if not is_mounted:
        problem = f"{directory} cannot be created, because {parent} is not a directory on this machine"
        advice = "mount the shared file system, or create that directory on it"
        raise ConfigInvalid(f"cluster.shared_directory: {problem}; {advice}")


def link_shared_directory(run: Path, shared: Path) -> None:
    """Create the subdirectories of `shared`, and links to them in the run directory.

    Raises ConfigInvalid if the run directory has such files of its own.
    """
    with storage_call(shared):
        run.mkdir(parents=True, exist_ok=True)
        for name in SHARED_SUBDIRECTORIES:
            target, link = shared.absolute() / name, run / name
            target.mkdir(parents=True, exist_ok=True)
            _replace_with_symlink(link, target)


def _replace_with_symlink(link: Path, target: Path) -> None:
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    elif link.is_dir():
        if any(link.iterdir()):
            problem = "is not in the run's shared directory (cluster.shared_directory)"
            raise ConfigInvalid(f"{link} {problem}: move its contents to {target}, and repeat the command")
        link.rmdir()
    link.symlink_to(target, target_is_directory=True)


def move_shared_aside(run: Path, shared: Path) -> Path | None:
    """Move the run directory aside as `--fresh` does, and rename its part of the shared directory to `NAME.old-N`.

    Return the new path of the run directory; None if there was none.
    """
    with storage_call(shared):
        old_run = move_aside(run) if run.exists() else None
        for name in SHARED_SUBDIRECTORIES:
            number, directory = 1, shared.absolute() / name
            while (old_directory := directory.with_name(f"{name}.old-{number}")).exists():
                number += 1
            if not directory.is_dir() or not any(directory.iterdir()):
                continue
            directory.rename(old_directory)
            if old_run is not None and (link := old_run / name).is_symlink():
                link.unlink()
                link.symlink_to(old_directory, target_is_directory=True)
    return old_run
