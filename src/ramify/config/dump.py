"""The resolved configuration as a file: every key, so that a run can be read and repeated from it alone.

TOML has no null. A key that is None is written as `"None"`, which `Config` reads back, rather than left out: left out
it would mean "the default", which another version may change. Reading the file gives an equal configuration.

A dry run leaves it too, but only where nothing has run yet: the files of a run say how it was started, and a process of
it that is started again reads them.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from ramify.config.base import NONE_LITERAL, Config
from ramify.config.schema import KeyPath, format_key, is_dict, is_list
from ramify.errors import ConfigInvalid, StorageFailed

DRY_RUN_FILES = {"config.toml", "plan.txt", "configs"}  # all that a dry run leaves in a run's directory


def dump_toml(config: Config) -> str:
    """The configuration as TOML."""
    return tomli_w.dumps(_dump_section((), config, config.model_dump(mode="json")))


def write_toml(config: Config, path: Path) -> None:
    """Write the configuration to `path`; a reader sees the old file or the new one, never a part."""
    text = dump_toml(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def dry_run(
    config: Config, directory: Path, plan: Sequence[str], *, write_files: Callable[[], None] | None = None
) -> None:
    """What `--dry-run` does in place of the work: write the resolved configuration (or what `leave` writes) and print
    the plan. A directory in which something has run stays as it is.
    """
    path = directory / "config.toml"
    try:
        begun = directory.is_dir() and any(entry.name not in DRY_RUN_FILES for entry in directory.iterdir())
        if not begun:
            write_toml(config, path) if write_files is None else write_files()
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be written: {error.strerror}") from error
    for line in plan:
        print(line)
    left = f"{directory} holds a run and stays as it is" if begun else f"the resolved configuration is in {path}"
    print(f"dry run: nothing was started; {left}")


def _dump_section(key: KeyPath, model: BaseModel, dumped: dict[str, Any]) -> dict[str, Any]:
    """The dumped section with its Nones spelled out; only a field of a model can read them back."""
    fields = type(model).model_fields
    table: dict[str, Any] = {}
    for name, value in dumped.items():
        spelled = value is None and name in fields
        table[name] = NONE_LITERAL if spelled else _dump_value((*key, name), getattr(model, name), value)
    return table


def _dump_value(key: KeyPath, value: Any, dumped: Any) -> Any:
    if dumped is None:
        raise ConfigInvalid(f"{format_key(key)}: None cannot be written to a TOML file; leave the key out")
    if isinstance(value, BaseModel):
        return _dump_section(key, value, dumped)
    if is_dict(dumped):
        inner = value.values() if is_dict(value) else dumped.values()
        return {name: _dump_value((*key, name), one, item) for one, (name, item) in zip(inner, dumped.items())}
    if is_list(dumped):
        inner = value if is_list(value) else dumped
        return [_dump_value((*key, place), one, item) for place, (one, item) in enumerate(zip(inner, dumped))]
    return dumped
