"""Downloading a model from the Hugging Face hub into its local cache.

The library `huggingface_hub` does the work: it resumes what was interrupted, locks against other processes and shows
progress bars in a terminal. This module chooses the files, reports progress if there is no terminal, and turns every
failure into one line that says how to get the model here.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ramify.core.errors import ModelNotFound
from ramify.core.terminal import get_raw_stream

FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
IGNORED_PATTERNS = ["original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "metal/*"]
PROGRESS_INTERVAL = 10.0  # seconds between two lines of progress
TRUE_VALUES = {"1", "ON", "YES", "TRUE"}


def download_model(name: str, cache_directory: Path, *, log: Callable[[str], None]) -> Path:
    """Download the model `name` (ORG/NAME) into `cache_directory` and return its directory. Raises ModelNotFound."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE_VALUES:
        raise _download_error(name, "HF_HUB_OFFLINE is set")
    from huggingface_hub import constants, snapshot_download  # takes a second, and few starts need it
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    log(f"downloading {name} from {endpoint} into {cache_directory}")
    started = time.monotonic()
    try:
        with _report_progress(name, cache_directory / f"models--{name.replace('/', '--')}", log):
            directory = Path(
                snapshot_download(
                    name,
                    cache_dir=cache_directory,
                    endpoint=endpoint,
                    allow_patterns=FILE_PATTERNS,
                    ignore_patterns=IGNORED_PATTERNS,
                )
            )
    except GatedRepoError as error:
        terms = f"accept its terms at {endpoint}/{name}, then log in with 'hf auth login'"
        raise ModelNotFound(f"model {name!r} needs permission: {terms}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        advice = "check the name; for a private model log in with 'hf auth login'"
        raise ModelNotFound(f"model {name!r} is neither a directory here nor on {endpoint}: {advice}") from error
    except Exception as error:  # the library passes on whatever its HTTP client, its cache or the disk raised
        raise _download_error(name, f"{endpoint}: {_describe_root_cause(error)}") from error
    log(f"downloaded {name} in {time.monotonic() - started:.0f} s")
    return directory


def _download_error(name: str, reason: str) -> ModelNotFound:
    """Return the error that says, in one line, how to get the model onto this machine by other means."""
    local = name.rpartition("/")[2]
    advice = f"where there is a network run 'hf download {name} --local-dir {local}', copy {local} here"
    return ModelNotFound(
        f"model {name!r} is not in the local cache and cannot be downloaded ({reason}): {advice}, and give -m {local}"
    )


def _describe_root_cause(error: BaseException) -> str:
    """Describe the original failure: the library wraps it in paragraphs of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextlib.contextmanager
def _report_progress(name: str, repo_directory: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Report the downloaded size every few seconds, unless the library shows its own bars in a terminal."""
    if sys.stderr.isatty():
        with contextlib.redirect_stderr(get_raw_stream(sys.stderr)):
            yield
        return
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_INTERVAL):
            log(f"downloading {name}: {_directory_size(repo_directory / 'blobs') / 1e6:.0f} MB so far")

    thread = threading.Thread(target=report, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _directory_size(directory: Path) -> int:
    total = 0
    for path in directory.glob("*"):
        with contextlib.suppress(OSError):  # the library renames a file when it is complete
            total += path.stat().st_size
    return total
