"""Resolving the name of a model to its directory.

A name is the model that ships with the package, a directory, `run:NAME@STEP` for a model that another run has trained,
or a Hugging Face id. `resolve_model_path` only looks at
this machine. `fetch_model` downloads an id of the form ORG/NAME that is not in the local cache: commands that will load
the model call it, dry runs and commands that only use a server do not.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ramify.core.errors import ModelNotFound
from ramify.core.names import suggest
from ramify.core.terminal import get_raw_stream
from ramify.model.run_models import expand_run_model
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken

FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
IGNORED_PATTERNS = ["original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "metal/*"]
PROGRESS_INTERVAL = 10.0  # seconds between two lines of progress
TRUE_VALUES = {"1", "ON", "YES", "TRUE"}


def download_model(name: str, cache_directory: Path, *, log: Callable[[str], None]) -> Path:
    """Download the model `name` (ORG/NAME) into `cache_directory` and return its directory. Raises ModelNotFound.

    `huggingface_hub` resumes what was interrupted, locks against other processes and shows progress bars in a terminal.
    """
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


PACKAGED_MODELS = ("tiny", "tiny-vision")
MAX_LISTED_WEIGHTS = 4  # directories in a message
WEIGHTS_NAME_PATTERN = re.compile(rf"({TOKEN_PATTERN})-(\d{{6,}})")  # the trainer's token, and the step


def resolve_model_path(name: str) -> Path:
    """Return the directory of the model `name`, which holds at least `config.json`. Raises ModelNotFound."""
    name = expand_run_model(name)
    if name in PACKAGED_MODELS:
        return _first_model_directory(name, [Path(__file__).parent / "bundled" / name])
    candidates = [Path(name).expanduser()]
    if _looks_like_id(name):
        candidates.append(_cached_snapshot_path(name))
    return _first_model_directory(name, candidates)


def fetch_model(name: str, *, log: Callable[[str], None] | None = None) -> Path:
    """Return the directory of the model `name` with all of its weights, downloaded if it is a hub id and not here.

    `log` gets lines about the download; by default they go to standard error. Raises ModelNotFound.
    """
    name = expand_run_model(name)
    try:
        directory = resolve_model_path(name)
    except ModelNotFound:
        if not is_hub_id(name):
            raise
    else:
        if not is_hub_id(name) or has_weights(directory):
            return directory

    return _first_model_directory(name, [download_model(name, _hub_cache_directory(), log=log or _print_to_stderr)])


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def has_weights(directory: Path) -> bool:
    """Return whether a model directory has all its weight files: a download may have been interrupted."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, RecursionError):
            return False
        return all((directory / file).is_file() for file in files)
    return any(path.is_file() for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))


def read_vocab_size(model_dir: Path) -> int | None:
    """Return the vocabulary size in a model's config.json; None if it cannot be read."""
    return _read_number(model_dir, "vocab_size")


def read_max_positions(model_dir: Path) -> int | None:
    """Return the longest sequence in tokens that a model's config.json allows; None if it cannot be read."""
    return _read_number(model_dir, "max_position_embeddings")


def _read_number(model_dir: Path, key: str) -> int | None:
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        return int(config[key] if key in config else config["text_config"][key])  # of a vision-language model
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _first_model_directory(name: str, candidates: list[Path]) -> Path:
    for directory in candidates:
        if (directory / "config.json").is_file():
            return directory.resolve()
    reasons = "; ".join(f"{path}: {_why_rejected(path)}" for path in candidates)
    advice = suggest(name, PACKAGED_MODELS, "give a directory, or a Hugging Face id ORG/NAME")
    if is_hub_id(name):
        advice = f"'ramify model fetch {name}' downloads it"
    advice = _describe_weights_near(Path(name).expanduser()) or advice
    raise ModelNotFound(f"model {name!r} was not found ({reasons}): {advice}")


def _describe_weights_near(path: Path) -> str | None:
    """Return which published weights a path may mean: of the run at `path`, or beside it; None if there are none."""
    for directory in (path, path / "weights", path.parent):
        if names := _list_published_weights(directory):
            listed = ", ".join(names[:MAX_LISTED_WEIGHTS])
            return f"{directory} holds {listed}" + (", ..." if len(names) > MAX_LISTED_WEIGHTS else "")
    return None


def _list_published_weights(directory: Path) -> list[str]:
    """Return the names of the published weights in a directory, newest first."""
    matches = [WEIGHTS_NAME_PATTERN.fullmatch(path.parent.name) for path in directory.glob("*/config.json")]
    versions = sorted((FencingToken.parse(match[1]), int(match[2]), match[0]) for match in matches if match)
    return [name for _, _, name in reversed(versions)]


def _why_rejected(directory: Path) -> str:
    if not directory.exists():
        return "does not exist"
    return "has no config.json" if directory.is_dir() else "is not a directory"


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form ORG/NAME and is not a directory here."""
    return name.count("/") == 1 and _looks_like_id(name) and not Path(name).exists()


def may_be_path(name: str) -> bool:
    """Return whether a name that is not here may be a mistyped path: it is not a hub id, or ORG is a directory here.

    A hub id of the second kind is still downloaded: a directory ORG may hold other models of that organization.
    """
    return not is_hub_id(name) or Path(name).parent.is_dir()


def _looks_like_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) in (1, 2) and all(part and not part.startswith((".", "~")) for part in parts)


def _hub_cache_directory() -> Path:
    """Return the directory of the local Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _cached_snapshot_path(name: str) -> Path:
    """Return where the local Hugging Face cache keeps the main revision of `name`."""
    repo_directory = _hub_cache_directory() / f"models--{name.replace('/', '--')}"
    main, snapshots = repo_directory / "refs" / "main", repo_directory / "snapshots"
    return snapshots / main.read_text().strip() if main.is_file() else snapshots
