"""The resolved configuration as a TOML file with every key, so that a run can be understood and repeated from it.

TOML has no null, so a key that is None is written as `"None"`, which `Config` reads back. If it were omitted, it would
mean the default, which another version may change. Reading the file gives an equal configuration.

A dry run writes the file too, but only if nothing has run in the directory: the files of a run describe how it was
started, and restarted processes read them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from ramify.core.config.base import NONE_LITERAL, Config
from ramify.core.config.schema import KeyPath, format_key, is_dict, is_list
from ramify.core.errors import ConfigInvalid, StorageFailed
from ramify.core.files import replace_file, write_and_fsync

CONFIG_FILE = "config.toml"  # in the directory of a run
PLAN_FILE = "plan.txt"
DRY_RUN_FILES = {CONFIG_FILE, PLAN_FILE, "configs"}  # all that a dry run writes


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML."""
    return tomli_w.dumps(_dump_section((), config, config.model_dump(mode="json")))


def write_toml(config: Config, path: Path) -> None:
    """Write the configuration to `path` atomically."""
    data = dump_toml(config).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial_path:
        write_and_fsync(partial_path, data)


def dry_run(
    config: Config, directory: Path, plan: Sequence[str], *, write_files: Callable[[], None] | None = None
) -> None:
    """Write the resolved configuration, or call `write_files`, which also writes the plan, and print the plan.

    A directory that already holds a run is not changed.
    """
    path = directory / CONFIG_FILE
    try:
        has_run = directory.is_dir() and any(entry.name not in DRY_RUN_FILES for entry in directory.iterdir())
        if not has_run:
            write_toml(config, path) if write_files is None else write_files()
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be written: {error.strerror}") from error
    for line in plan:
        print(line)
    written = f"the resolved configuration is in {path}" + ("" if write_files is None else f", the plan in {PLAN_FILE}")
    outcome = f"{directory} holds a run and is unchanged" if has_run else written
    print(f"dry run: nothing was started; {outcome}")


def _dump_section(key: KeyPath, model: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    """Return the dumped section with None as a literal, which only fields of a model can read back."""
    fields = type(model).model_fields
    return {
        name: NONE_LITERAL
        if value is None and name in fields
        else _dump_value((*key, name), getattr(model, name), value)
        for name, value in dumped.items()
    }


def _dump_value(key: KeyPath, value: Any, dumped: Any) -> Any:
    if dumped is None:
        raise ConfigInvalid("None cannot be written to a TOML file; leave the key out", key=format_key(key))
    if isinstance(value, BaseModel):
        return _dump_section(key, value, dumped)
    if is_dict(dumped):
        values = value.values() if is_dict(value) else dumped.values()
        return {name: _dump_value((*key, name), child, item) for child, (name, item) in zip(values, dumped.items())}
    if is_list(dumped):
        values = value if is_list(value) else dumped
        return [_dump_value((*key, index), child, item) for index, (child, item) in enumerate(zip(values, dumped))]
    return dumped
