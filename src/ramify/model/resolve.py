"""Resolving the name of a model to its directory.

A name is the model that ships with the package, a directory, `run:NAME@STEP` for a model that another run has trained,
or a Hugging Face id. `resolve_model_path` only looks at this machine. `fetch_model` downloads an id of the form
ORG/NAME that is not in the local cache: commands that will load the model call it, dry runs and commands that only use
a server do not. `fetch_model` also exports the model of another run, see `run_models`.
"""

import json
import re
from pathlib import Path
from typing import Any

from ramify.core.errors import ModelNotFound
from ramify.core.hub import (
    HubRepo,
    Log,
    download_errors,
    download_snapshot,
    is_hub_id,
    looks_like_id,
    print_to_stderr,
)
from ramify.core.names import suggest
from ramify.model.pack_layout import TEXT_PART_MODEL_TYPES
from ramify.model.run_models import can_export, expand_run_model, export_run_model
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken

FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
IGNORED_PATTERNS = ["original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "metal/*"]
PACKAGED_MODELS = ("tiny", "tiny-vision")
MAX_LISTED_WEIGHTS = 4  # directories in a message
WEIGHTS_NAME_PATTERN = re.compile(rf"({TOKEN_PATTERN})-(\d{{6,}})")  # the trainer's token, and the step


def resolve_model_path(name: str) -> Path:
    """Return the directory of the model `name`, with its `config.json`. Raises ModelNotFound.

    A hub id of which the cache holds neither a tokenizer nor weights is not found, see `resolve_config_path`.
    """
    name = expand_run_model(name)
    directory = resolve_config_path(name)
    is_local_directory = directory == Path(name).expanduser().resolve()
    if not is_local_directory and not (directory / "tokenizer.json").is_file() and not has_weights(directory):
        raise ModelNotFound(f"only the config of model {name!r} is in the local cache, {directory}: {_advise(name)}")
    return directory


def resolve_config_path(name: str) -> Path:
    """Return the directory with the `config.json` of `name`; for a hub id, other files may be missing.

    Raises ModelNotFound.
    """
    name = expand_run_model(name)
    if name in PACKAGED_MODELS:
        return _first_model_directory(name, [Path(__file__).parent / "bundled" / name])
    candidates = [Path(name).expanduser()]
    if looks_like_id(name):
        repo = HubRepo("model", name)
        candidates.append(repo.find_snapshot() or repo.cache_path / "snapshots")
    return _first_model_directory(name, candidates)


def fetch_model(name: str, *, log: Log = print_to_stderr) -> Path:
    """Return the directory of the model `name` with all of its weights, downloaded or exported if it is not here.

    `log` gets lines about the download. Raises ModelNotFound.
    """
    name = expand_run_model(name)
    export_run_model(name)
    try:
        directory = resolve_model_path(name)
    except ModelNotFound:
        if not is_hub_id(name):
            raise
    else:
        if not is_hub_id(name) or has_weights(directory):
            return directory

    return _first_model_directory(name, [_download(name, log, FILE_PATTERNS)])


def fetch_config(name: str) -> Path:
    """Return a directory with the config of the model `name`, which is all that is downloaded of a hub id.

    Raises ModelNotFound.
    """
    name = expand_run_model(name)
    export_run_model(name)
    try:
        return resolve_config_path(name)
    except ModelNotFound:
        if not is_hub_id(name):
            raise
    return _first_model_directory(name, [_download(name, print_to_stderr, ["config.json"], f"config.json of {name}")])


def _download(name: str, log: Log, patterns: list[str], label: str = "") -> Path:
    local = name.rpartition("/")[2]
    advice = f"where there is a network run 'hf download {name} --local-dir {local}', copy {local} here"
    repo = HubRepo("model", name)
    with download_errors(repo, ModelNotFound, f"{advice}, and give -m {local}"):
        return download_snapshot(repo, log=log, label=label, allow_patterns=patterns, ignore_patterns=IGNORED_PATTERNS)


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


def is_loaded_as_text(model_dir: Path) -> bool:
    """Return whether the model is a vision-language model of which only the text part is loaded."""
    return str(read_model_config(model_dir).get("model_type")) in TEXT_PART_MODEL_TYPES


def _read_number(model_dir: Path, key: str) -> int | None:
    config = read_model_config(model_dir)
    try:
        return int(config[key] if key in config else config["text_config"][key])  # of a vision-language model
    except (ValueError, KeyError, TypeError):
        return None


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """Return the table in a model's config.json; an empty one if it cannot be read."""
    try:
        config: Any = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _first_model_directory(name: str, candidates: list[Path]) -> Path:
    for directory in candidates:
        if (directory / "config.json").is_file():
            return directory.resolve()
    reasons = "; ".join(f"{path}: {_why_rejected(path)}" for path in candidates)
    raise ModelNotFound(f"model {name!r} was not found ({reasons}): {_advise(name)}")


def _advise(name: str) -> str:
    """Return what to do if a model is not here."""
    if published := _describe_weights_near(Path(name).expanduser()):
        return published
    if is_fetchable(name):
        return f"'ramify model fetch {name}' {'downloads' if is_hub_id(name) else 'exports'} it"
    return suggest(name, PACKAGED_MODELS, "give a directory, or a Hugging Face id ORG/NAME")


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


def is_fetchable(name: str) -> bool:
    """Return whether `fetch_model` downloads or exports a model that is not here."""
    return is_hub_id(name) or can_export(name)


def describe_missing_model(key: str, name: str) -> str | None:
    """Return the note of a dry run about a model that is not here; None if it is here."""
    try:
        resolve_model_path(name)
    except ModelNotFound as error:
        if _may_be_path(name):
            return f"note: {key}: not checked: {error.message}"
        verb = "downloads" if is_hub_id(name) else "exports"
        return f"note: {key}: the run {verb} {name} when it starts; to do it now: 'ramify model fetch {name}'"
    return None


def _may_be_path(name: str) -> bool:
    """Return whether a name that is not here may be a mistyped path: it cannot be fetched, or ORG is a directory here.

    A hub id of the second kind is still downloaded: a directory ORG may hold other models of that organization.
    """
    return not is_fetchable(name) or (is_hub_id(name) and Path(name).parent.is_dir())
