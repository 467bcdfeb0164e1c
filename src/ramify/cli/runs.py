"""What the commands around runs share: finding the run they are given, and paper to print on."""

import sys
from pathlib import Path

from ramify.cli.paper import Paper
from ramify.errors import ConfigInvalid
from ramify.store import Row, RunStore
from ramify.store.store import DATABASE

OUTPUTS = Path("outputs")
WIDTH = 120  # columns where there is no terminal to ask


def open_named(name: str) -> RunStore:
    """The run, open for reading."""
    return RunStore.open(run_path(name), write=False)


def run_path(name: str) -> Path:
    """The run's directory."""
    for path in (Path(name), OUTPUTS / name):
        if (path / DATABASE).is_file():
            return path
    raise ConfigInvalid(f"no run {name!r}: neither it nor {OUTPUTS / name} is a directory with a {DATABASE}")


def pick(store: RunStore, name: str) -> Row:
    """The rollout whose id is `name` or begins so."""
    rows = store.rows()
    found = [row for row in rows if row.id == name] or [row for row in rows if row.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigInvalid(f"{name!r} is not one rollout: {', '.join(row.id for row in found[:8])}")
    raise ConfigInvalid(f"{store.path} has no rollout {name!r}; 'ramify show {store.path}' lists them")


def paper() -> Paper:
    """Where tables and trees are printed."""
    return Paper(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
