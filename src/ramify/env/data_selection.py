"""Selects the files of a dataset by subset and part, in a directory or a repository of the Hugging Face hub.

The card of a dataset (`README.md`) may name the files of each subset and part; otherwise the names of files and
directories do. Datasets are downloaded by `fetch_dataset` before anything reads them, and only the selected files.
"""

import fnmatch
import glob
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import ConfigInvalid
from ramify.core.files import write_atomically
from ramify.core.hub import (
    MAIN_REVISION,
    HubRepo,
    Log,
    download_errors,
    download_snapshot,
    get_endpoint,
    is_hub_id,
    looks_like_id,
)
from ramify.env.data_config import DataFilesConfig

CARD = "README.md"
DATA_SUFFIXES = (".jsonl", ".parquet", ".arrow", ".csv", ".json")
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
COMMIT_CHARS = 12  # of a commit in a message
DATASET_TASKSETS = ("dataset", "swe")  # the tasksets whose tables have the keys of a `DataFilesConfig`
METADATA_FILES = (  # `datasets` writes these
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)


def find_repo(config: DataFilesConfig) -> HubRepo | None:
    """Return the dataset on the hub; None if `path` is, or can only be, a path here."""
    is_path = Path(config.path).suffix in DATA_SUFFIXES or Path(config.path).expanduser().exists()
    return None if is_path or not looks_like_id(config.path) else HubRepo("dataset", config.path)


def list_data_files(config: DataFilesConfig) -> list[Path]:
    """Return the files with the rows. Raises ConfigInvalid if there are none here; nothing is downloaded."""
    path = Path(config.path).expanduser()
    if config.revision is not None and find_repo(config) is None:
        raise ConfigInvalid(f"dataset: revision is for datasets of the hub, and {path} is a path; remove it")
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            raise ConfigInvalid(f"dataset: {path} is not one of {', '.join(DATA_SUFFIXES)}")
        if config.part or config.subset:
            key = "part" if config.part else "subset"
            raise ConfigInvalid(f"dataset: {path} is a file, which has no parts or subsets; remove `{key}`")
        return [path]
    if path.is_dir():
        names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        return [path / name for name in _select_files(names, path, config)]
    if (cached := _find_snapshot(config)) is None:
        revision = f" at revision {config.revision!r}" if config.revision else ""
        raise ConfigInvalid(
            f"dataset: {config.path} is not a file or directory, and is not in the local cache{revision}; "
            f"'ramify data {config.path}' downloads a dataset of the hub"
        )
    if (files := _find_cached_files(*cached, config)) is None:
        raise ConfigInvalid(f"dataset: {config.path} was downloaded in part; 'ramify data {config.path}' completes it")
    return files


def find_data_directory(config: DataFilesConfig) -> Path:
    """Return the directory to which paths in the rows are relative: of the files, or of the cached dataset."""
    path = Path(config.path).expanduser()
    if (cached := _find_snapshot(config)) is not None:
        return cached[1]
    return path if path.is_dir() else path.parent


def fetch_dataset(config: DataFilesConfig, log: Log) -> str | None:
    """Return the commit of a dataset of the hub, whose selected files are downloaded unless they are in the cache.

    Returns None for a path. Raises ConfigInvalid.
    """
    repo, revision = find_repo(config), config.revision or MAIN_REVISION
    if repo is None:
        return None
    if (commit := find_cached_commit(config)) is not None:
        return commit
    if not is_hub_id(config.path):  # without ORG, it is only looked up in the cache
        list_data_files(config)  # raises ConfigInvalid
    local = repo.name.rpartition("/")[2]
    option = f" --revision {config.revision}" if config.revision else ""
    advice = (
        f"where there is a network run 'hf download --repo-type dataset {repo.name}{option} --local-dir {local}', "
        f"copy {local} here, and set path = {local!r}"
    )
    with download_errors(repo, ConfigInvalid, advice):
        hub: Any = import_module("huggingface_hub")  # few starts need it
        info = hub.HfApi(endpoint=get_endpoint()).dataset_info(repo.name, revision=revision)
        names = {sibling.rfilename for sibling in info.siblings or ()}
        card = Path()
        if CARD in names:
            options: dict[str, Any] = {"cache_dir": repo.cache_path.parent, "endpoint": get_endpoint()}
            card = Path(hub.hf_hub_download(repo.name, CARD, repo_type=repo.kind, revision=info.sha, **options))
        selected = [CARD, *_select_files(names, card.parent, config)]
        patterns = [glob.escape(name) for name in selected]
        if revision != info.sha:  # `huggingface_hub` records it only for downloads by the name of a branch or tag
            (ref := repo.cache_path / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, info.sha)
        return download_snapshot(repo, revision=info.sha, log=log, allow_patterns=patterns).name


def find_cached_commit(config: DataFilesConfig) -> str | None:
    """Return the commit of a dataset of the hub if all selected files are in the local cache, else None."""
    cached = _find_snapshot(config)
    return cached[1].name if cached is not None and _find_cached_files(*cached, config) is not None else None


def pin_dataset(
    config: DataFilesConfig,
    previous: DataFilesConfig | None,
    *,
    key: str,
    log: Log | None,
    accept_changes: bool | None = None,
) -> str | None:
    """Return the commit that a run reads: the one it has read before, unless `revision` names another one.

    `previous` are the keys with which the run was started before. Without `log` nothing is downloaded, and a revision
    that is not in the cache is not compared. Returns None for a path, or if the commit is not known yet. Raises
    ConfigInvalid, for the section `key`, if the revision is another one than before, unless `accept_changes`; None
    means that there is no such option.
    """
    commit = _find_previous_commit(config, previous)
    if commit is not None and config.revision is None:
        config = config.model_copy(update={"revision": commit})
    try:
        current = find_cached_commit(config) if log is None else fetch_dataset(config, log)
    except ConfigInvalid as error:
        raise ConfigInvalid(error.message, key=f"{key}.path") from error
    if commit is not None and current not in (None, commit) and not accept_changes:
        accept = "" if accept_changes is None else ", --accept-changes reads the other one from now on"
        raise ConfigInvalid(
            f"{config.path} at {config.revision!r} is now {(current or '')[:COMMIT_CHARS]}, but this run has read "
            f"{commit[:COMMIT_CHARS]}; revision = '{commit}' or no revision continues with it{accept}, "
            "--fresh starts over",
            key=f"{key}.revision",
        )
    return current or commit


def _find_previous_commit(config: DataFilesConfig, previous: DataFilesConfig | None) -> str | None:
    if previous is None or previous.path != config.path or not COMMIT_PATTERN.fullmatch(previous.revision or ""):
        return None
    return previous.revision


def find_dataset(taskset: dict[str, Any]) -> DataFilesConfig | None:
    """Return the dataset of the hub that the table of a taskset names; None if it names none, or not correctly."""
    if taskset.get("id") not in DATASET_TASKSETS:
        return None
    try:
        config = DataFilesConfig(**{key: taskset[key] for key in DataFilesConfig.model_fields if key in taskset})
    except ValueError:  # reported when the taskset is loaded
        return None
    return None if find_repo(config) is None else config


def fetch_dataset_of(taskset: dict[str, Any], log: Log) -> None:
    """Download what `fetch_dataset` downloads, if the table of a taskset names a dataset. Raises ConfigInvalid."""
    if (config := find_dataset(taskset)) is not None:
        fetch_dataset(config, log)


def find_missing_dataset(taskset: dict[str, Any]) -> str | None:
    """Return the dataset that a taskset would download; None if its files are here, or if it has none."""
    config = find_dataset(taskset)
    is_missing = config is not None and is_hub_id(config.path) and find_cached_commit(config) is None
    return config.path if config is not None and is_missing else None


def find_kept_commit(table: dict[str, Any], previous: dict[str, Any] | None) -> str | None:
    """Return the commit of the dataset of a taskset that a resumed run continues with; None if it has none yet."""
    config, before = find_dataset(table), find_dataset(previous) if previous else None
    return None if config is None or config.revision is not None else _find_previous_commit(config, before)


def pin_taskset(
    table: dict[str, Any],
    previous: dict[str, Any] | None,
    *,
    key: str,
    log: Log | None,
    accept_changes: bool | None = None,
) -> dict[str, Any]:
    """Return the table of a taskset with the commit of its dataset as `revision`, see `pin_dataset`.

    The table of a taskset without a dataset of the hub is returned unchanged.
    """
    if (config := find_dataset(table)) is None:
        return table
    before = find_dataset(previous) if previous else None
    commit = pin_dataset(config, before, key=key, log=log, accept_changes=accept_changes)
    return table if commit is None else {**table, "revision": commit}


def _find_snapshot(config: DataFilesConfig) -> tuple[HubRepo, Path] | None:
    """Return the dataset on the hub and its cached commit; None for a path, or if nothing of the commit is cached."""
    repo = find_repo(config)
    snapshot = repo.find_snapshot(config.revision or MAIN_REVISION) if repo is not None else None
    return None if repo is None or snapshot is None else (repo, snapshot)


def _find_cached_files(repo: HubRepo, snapshot: Path, config: DataFilesConfig) -> list[Path] | None:
    """Return the selected files of a cached commit; None if one of them, or the card, is missing."""
    names = repo.list_files(snapshot)
    if CARD in names and not (snapshot / CARD).is_file():
        return None
    files = [snapshot / name for name in _select_files(names, snapshot, config)]
    return files if all(file.is_file() for file in files) else None


# -- selection ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DataSubset:
    """A subset as the card describes it: patterns of the files of its parts; "" is the part without a name."""

    is_default: bool
    patterns: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


def _select_files(names: Collection[str], directory: Path, config: DataFilesConfig) -> list[str]:
    """Return the files of the subset and the part, out of `names` relative to a directory, which holds the card."""
    data_names = _find_data_names(names)
    if subsets := _read_card(directory / CARD):
        subset = _choose_subset(subsets, config)
        if "" not in subset.patterns:
            return _select_listed(data_names, subset.patterns, config)
        data_names = [name for name in data_names if _matches(name, subset.patterns[""])]
    elif config.subset is not None:
        folders = {folder for name in data_names for folder in PurePosixPath(name).parts[:-1]}
        if config.subset not in folders:
            raise ConfigInvalid(f"dataset: {config.path} has no subset {config.subset!r}")
        data_names = [name for name in data_names if config.subset in PurePosixPath(name).parts[:-1]]
    selected = [name for name in data_names if config.part is None or config.part in _part_names(name)]
    if not selected:
        parts = sorted({word for name in data_names for word in _part_names(name)})
        raise _missing_part_error(config, parts)
    return selected


def _find_data_names(names: Collection[str]) -> list[str]:
    """Return the files that can hold rows, without what `datasets` writes beside files of other formats."""
    readable = [PurePosixPath(name) for name in sorted(names) if PurePosixPath(name).suffix in DATA_SUFFIXES]
    files = [
        file
        for file in readable
        if not (file.name.startswith("cache-") and str(file.parent / "state.json") in names)
        and file.name not in METADATA_FILES
    ]
    return [str(file) for file in files if file.suffix not in (".csv", ".json")] or [str(file) for file in files]


def _select_listed(
    data_names: list[str], patterns_by_part: Mapping[str, list[str]], config: DataFilesConfig
) -> list[str]:
    """Return the files of a part by the patterns that the card lists for it."""
    parts = list(patterns_by_part) if config.part is None else [config.part]
    patterns = [pattern for part in parts for pattern in patterns_by_part.get(part, ())]
    selected = [name for name in data_names if _matches(name, patterns)]
    if not selected:
        raise _missing_part_error(config, sorted(patterns_by_part))
    return selected


def _missing_part_error(config: DataFilesConfig, parts: list[str]) -> ConfigInvalid:
    missing = f"part {config.part!r}" if config.part and parts else "data files"
    return ConfigInvalid(f"dataset: {config.path} has no {missing}; it has {', '.join(parts) or 'no data files'}")


def _choose_subset(subsets: Mapping[str, DataSubset], config: DataFilesConfig) -> DataSubset:
    if config.subset is not None:
        if config.subset not in subsets:
            listed = ", ".join(subsets)
            raise ConfigInvalid(f"dataset: {config.path} has no subset {config.subset!r}; it has {listed}")
        return subsets[config.subset]
    defaults = [subset for name, subset in subsets.items() if subset.is_default or name == "default"]
    if len(subsets) > 1 and not defaults:
        raise ConfigInvalid(f"dataset: {config.path} has the subsets {', '.join(subsets)}; set `subset` to one of them")
    return (defaults or list(subsets.values()))[0]


def _read_card(card: Path) -> dict[str, DataSubset]:
    """Return the subsets that the card of a dataset lists, by name; an empty dict if it lists none.

    Raises ConfigInvalid if they are not listed as on the hub.
    """
    if not card.is_file() or "configs:" not in card.read_text("utf-8", errors="replace"):
        return {}
    hub: Any = import_module("huggingface_hub")  # few starts need it
    yaml: Any = import_module("yaml")
    try:
        metadata: dict[str, Any] = hub.metadata_load(card) or {}
        entries: list[dict[str, Any]] = metadata.get("configs") or []
        return {str(entry["config_name"]): _parse_subset(entry) for entry in entries if entry.get("data_files")}
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        expected = "each entry needs `config_name`, and `data_files` with `split` and `path`"
        raise ConfigInvalid(
            f"dataset: {card}: `configs` cannot be read ({problem}): {expected}; correct it, or remove {CARD}"
        ) from error


def _parse_subset(entry: Mapping[str, Any]) -> DataSubset:
    """Parse `data_files` of a card: a pattern, a list of patterns, or a list of tables with `split` and `path`."""
    subset, data_files = DataSubset(bool(entry.get("default"))), entry["data_files"]
    for item in data_files if is_list(data_files) else [data_files]:
        part, paths = (str(item["split"]), item["path"]) if is_dict(item) else ("", item)
        subset.patterns.setdefault(part, []).extend(paths if is_list(paths) else [str(paths)])
    return subset


def _matches(name: str, patterns: list[str]) -> bool:
    return any(
        fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns
    )


def _part_names(name: str) -> set[str]:
    """Return the names of a file's part: `train` for `train/data-0.arrow`, `train-0-of-2.parquet` and `train.jsonl`."""
    path = PurePosixPath(name)
    return {*path.parts[:-1], path.stem.split("-")[0], path.stem}
