"""The Hugging Face hub and its local cache: repositories of models and datasets.

Looking into the cache needs neither a network nor `huggingface_hub`, which is imported only for a download. It
resumes a broken connection, does not repeat finished files, locks against other processes, and shows progress bars in
a terminal; elsewhere a line every few seconds reports the progress.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ramify.core.errors import RamifyError
from ramify.core.terminal import get_raw_stream

PROGRESS_INTERVAL = 10.0  # seconds between two lines of progress
TRUE_VALUES = {"1", "ON", "YES", "TRUE"}
MAIN_REVISION = "main"

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository on the hub: its kind, and its name ORG/NAME."""

    kind: Literal["model", "dataset"]
    name: str

    @property
    def cache_path(self) -> Path:
        """Its directory in the local cache."""
        return get_cache_directory() / f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def url(self) -> str:
        """Its page on the hub."""
        return f"{get_endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    def find_snapshot(self, revision: str = MAIN_REVISION) -> Path | None:
        """Return the cached files of a branch, tag or commit, perhaps not all of them; None if there are none."""
        ref = self.cache_path / "refs" / revision
        snapshot = self.cache_path / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
        return snapshot if snapshot.is_dir() else None

    def list_files(self, snapshot: Path) -> set[str]:
        """Return the files of a cached commit: those that the hub listed at the last download, or else the cached."""
        listing = self.cache_path / "trees" / f"{snapshot.name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return set(json.loads(listing.read_text("utf-8"))["files"])
        return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form ORG/NAME and is not a path here."""
    return name.count("/") == 1 and looks_like_id(name) and not Path(name).exists()


def looks_like_id(name: str) -> bool:
    """Return whether a name has the form NAME or ORG/NAME, as relative paths have too."""
    parts = name.split("/")
    return len(parts) in (1, 2) and all(part and not part.startswith((".", "~")) for part in parts)


def get_cache_directory() -> Path:
    """Return the directory of the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def get_endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def print_to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def download_errors(repo: HubRepo, error_class: type[RamifyError], advice: str) -> Generator[None]:
    """Raise `error_class` for whatever fails inside, in one line; `advice` says how to get the files without a network.

    Raises it at once if downloads are forbidden.
    """
    title = f"{repo.kind} {repo.name!r}"

    def build_error(reason: str) -> RamifyError:
        return error_class(f"{title} is not in the local cache and cannot be downloaded ({reason}): {advice}")

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE_VALUES:
        raise build_error("HF_HUB_OFFLINE is set")
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except RamifyError:
        raise
    except GatedRepoError as error:
        terms = f"accept its terms at {repo.url}, then log in with 'hf auth login'"
        raise error_class(f"{title} needs permission: {terms}") from error
    except RevisionNotFoundError as error:
        raise error_class(f"{title} has no such revision on {get_endpoint()}: give a branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        remedy = f"check the name; for a private {repo.kind} log in with 'hf auth login'"
        raise error_class(f"{title} is neither a path here nor on {get_endpoint()}: {remedy}") from error
    except Exception as error:  # the library passes on whatever its HTTP client, its cache or the disk raised
        raise build_error(f"{get_endpoint()}: {_describe_root_cause(error)}") from error


def download_snapshot(
    repo: HubRepo, *, revision: str = MAIN_REVISION, log: Log, label: str = "", **patterns: list[str]
) -> Path:
    """Download the files of a revision into the cache and return their directory, named by the commit.

    `label` names what is downloaded, by default the repository. `patterns` are `allow_patterns` and `ignore_patterns`
    of `huggingface_hub`. Called inside `download_errors`.
    """
    snapshot_download: Any = import_module("huggingface_hub").snapshot_download  # few starts need it
    label = label or repo.name
    log(f"downloading {label} from {get_endpoint()} into {repo.cache_path.parent}")
    started = time.monotonic()
    options: dict[str, Any] = {"cache_dir": repo.cache_path.parent, "endpoint": get_endpoint(), **patterns}
    with _report_progress(repo, label, log):
        directory = Path(snapshot_download(repo.name, repo_type=repo.kind, revision=revision, **options))
    log(f"downloaded {label} in {time.monotonic() - started:.0f} s")
    return directory


@contextlib.contextmanager
def _report_progress(repo: HubRepo, label: str, log: Log) -> Generator[None]:
    """Report the downloaded size every few seconds, unless the library shows its own bars in a terminal."""
    if sys.stderr.isatty():
        with contextlib.redirect_stderr(get_raw_stream(sys.stderr)):
            yield
        return
    ended, size_before = threading.Event(), _measure_blobs(repo)

    def report() -> None:
        while not ended.wait(PROGRESS_INTERVAL):
            log(f"downloading {label}: {(_measure_blobs(repo) - size_before) / 1e6:.0f} MB so far")

    thread = threading.Thread(target=report, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _measure_blobs(repo: HubRepo) -> int:
    total = 0
    for path in (repo.cache_path / "blobs").glob("*"):
        with contextlib.suppress(OSError):  # the library renames a file when it is complete
            total += path.stat().st_size
    return total


def _describe_root_cause(error: BaseException) -> str:
    """Describe the original failure: the library wraps it in paragraphs of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]
