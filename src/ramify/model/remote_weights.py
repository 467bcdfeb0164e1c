"""Published weights in an object store, for engines on nodes that do not reach the trainer's file system.

The trainer copies every version there, its manifest last. The first engine of a node that needs a version fetches it
into a cache directory of the node and verifies it; the other engines of the node wait for it and load the same files.
Any URL that fsspec knows works: `s3://` and `gs://` with s3fs and gcsfs installed, `file://` without more.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ramify.core.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    ProviderError,
    RamifyError,
    WeightsRefused,
    WeightsReplaced,
)
from ramify.core.files import create_directory, flock_with_timeout
from ramify.core.watchdog import watch_storage
from ramify.model.weights_manifest import MANIFEST_FILE, verify_weights

UPLOAD_TIMEOUT = 300.0  # seconds of failed uploads after which the trainer fails
RETRY_DELAY = 2.0  # seconds before a failed upload is tried again
FETCH_TIMEOUT = 600.0  # seconds to wait for another engine of the node that fetches weights
POLL_INTERVAL = 0.1
MAX_CACHED_VERSIONS = 3  # of one run on one node: an engine may be loading an older one


def get_run_url(url: str, run: str) -> str:
    """Return the URL of the versions of one run below `url`, given the id of the run.

    Several runs may have the same name and number their versions alike; no engine may take the weights of another run.
    """
    return f"{url}/{run}" if run else url


def upload_weights(directory: Path, url: str) -> None:
    """Copy a published directory to `url`/NAME; its manifest is copied last, and an old one is removed first.

    A store that fails is tried again for UPLOAD_TIMEOUT seconds, then ProviderError is raised.
    """
    deadline = time.monotonic() + UPLOAD_TIMEOUT
    while True:
        try:
            return _upload(directory, url)
        except ProviderError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_DELAY)


def _upload(directory: Path, url: str) -> None:
    files, root = _open_file_system(url)
    remote = f"{root}/{directory.name}"
    with _wrap_errors(f"{url}/{directory.name}"):
        with watch_storage(remote):
            files.makedirs(remote, exist_ok=True)
        _remove_manifest(files, remote)
        for path in sorted(directory.iterdir(), key=lambda path: path.name == MANIFEST_FILE):
            with watch_storage(remote, path.stat().st_size):
                files.put_file(str(path), f"{remote}/{path.name}")


def remove_uploaded_weights(name: str, url: str) -> None:
    """Remove the version `name` from `url`, its manifest first. Raises ProviderError."""
    files, root = _open_file_system(url)
    with _wrap_errors(f"{url}/{name}"):
        _remove_manifest(files, f"{root}/{name}")
        with contextlib.suppress(FileNotFoundError), watch_storage(f"{url}/{name}"):
            files.rm(f"{root}/{name}", recursive=True)


def fetch_weights(name: str, url: str, run: str = "") -> Path:
    """Return a directory of this node with the version `name` of a run; fetch and verify it if the node has none.

    Raises WeightsReplaced if the version does not exist any more, WeightsRefused if it is damaged, ProviderError if the
    store fails, and DeadlineExceeded if another engine does not finish fetching the version.
    """
    if not name or name.startswith("."):
        raise WeightsRefused(f"{name!r} is not the name of a version")
    if "/" in run or run.startswith("."):
        raise WeightsRefused(f"{run!r} is not the id of a run")
    cache = get_cache_directory() / hashlib.sha256(url.encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / (f"{run}-{name}" if run else name)
    with _lock(cache / ".lock"):
        if not (directory / MANIFEST_FILE).is_file():
            _remove_old_versions(cache)
            _fetch(directory, f"{get_run_url(url, run)}/{name}")
    return directory


def get_cache_directory() -> Path:
    """Return the directory of fetched weights on this node; the variable TMPDIR moves it."""
    return Path(tempfile.gettempdir()) / f"ramify-weights-{os.getuid()}"


def _fetch(directory: Path, url: str) -> None:
    """Copy the version at `url` to `directory`."""
    files, remote = _open_file_system(url)
    with _wrap_errors(url):
        with watch_storage(url):
            is_published = files.exists(f"{remote}/{MANIFEST_FILE}")
        if not is_published:
            raise WeightsReplaced(f"{url} does not exist: a newer version was published")
        with create_directory(directory) as partial_path:
            with watch_storage(url):
                entries = files.ls(remote, detail=True)
            for entry in entries:
                with watch_storage(url, entry.get("size") or 0):
                    files.get_file(entry["name"], str(partial_path / Path(entry["name"]).name))
            verify_weights(partial_path)


def _remove_manifest(files: Any, remote: str) -> None:
    with contextlib.suppress(FileNotFoundError), watch_storage(remote):
        files.rm_file(f"{remote}/{MANIFEST_FILE}")


def _remove_old_versions(cache: Path) -> None:
    """Remove what interrupted fetches left, and all but the last MAX_CACHED_VERSIONS - 1 versions."""
    paths = sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    versions = [path for path in paths if not path.name.startswith(".")]
    for path in paths:
        if path not in versions[-(MAX_CACHED_VERSIONS - 1) :]:
            shutil.rmtree(path, ignore_errors=True)


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs  # takes a while to import, and most runs do not need it

    try:
        files, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigInvalid(f"{url} cannot be used: {error}", key="weights.url") from error
    return files, str(root).rstrip("/")


@contextlib.contextmanager
def _wrap_errors(url: str) -> Generator[None]:
    """Raise errors of the store as ProviderError; every implementation has exceptions of its own."""
    try:
        yield
    except RamifyError:
        raise
    except Exception as error:
        raise ProviderError(f"{url} cannot be read or written: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock. Raises DeadlineExceeded after FETCH_TIMEOUT."""
    with path.open("w") as file:
        if not flock_with_timeout(file, fcntl.LOCK_EX, timeout=FETCH_TIMEOUT, poll_interval=POLL_INTERVAL):
            problem = f"another process has not fetched the weights within {FETCH_TIMEOUT:g} s"
            raise DeadlineExceeded(f"{path.parent}: {problem}")
        yield
