"""What the commands around runs share: finding the run they are given, and paper to print on."""

import sys
from pathlib import Path

from ramify.cli.console import PipeConsole
from ramify.errors import ConfigInvalid, RamifyError
from ramify.store import RolloutRecord, RunStore
from ramify.store.index import DATABASE_NAME, check_index_file
from ramify.store.ledger import Ledger

OUTPUT_DIR = Path("outputs")
DEFAULT_WIDTH = 120  # columns where there is no terminal to ask


def open_run_readonly(name: str) -> RunStore:
    """The run, open for reading."""
    return RunStore.open(find_run(name), write=False)


def find_run(name: str) -> Path:
    """Return the run's directory. Raises RunDamaged for one that has lost its index."""
    for path in (Path(name), OUTPUT_DIR / name):
        check_index_file(path)
        if (path / DATABASE_NAME).is_file():
            return path
    raise ConfigInvalid(f"no run {name!r}: neither it nor {OUTPUT_DIR / name} is a directory with a {DATABASE_NAME}")


def find_rollout(store: RunStore, id_prefix: str) -> RolloutRecord:
    """The rollout whose id is `name` or begins so."""
    rows = store.find_rollouts(id_prefix, limit=8)
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise ConfigInvalid(f"{id_prefix!r} is not one rollout: {', '.join(row.id for row in rows)}")
    raise ConfigInvalid(f"{store.path} has no rollout {id_prefix!r}; 'ramify show {store.path}' lists them")


def describe_resume(path: Path, command: str) -> str:
    """Return what an ended run has kept, and the command that continues it.

    It is printed beside the failure that ended the run, so a run that cannot be read raises nothing here.
    """
    try:
        kept = _describe_progress(path)
    except RamifyError:
        return f"what was finished is kept. Continue with: {command}"
    return f"kept: {kept}. Continue with: {command}" if kept else f"nothing is finished yet. Begin with: {command}"


def _describe_progress(path: Path) -> str:
    """Return what is in a run, such as "3 steps and 40 rollouts"; "" for a run without rollouts or without an index."""
    if not (path / DATABASE_NAME).is_file():
        return ""
    with RunStore.open(path, write=False) as store:
        ((rollouts,),) = store.select("SELECT count(*) FROM rollouts")
        steps = Ledger.open_readonly(store).progress().committed if Ledger.exists_in(store) else 0
    counts = {"step": steps, "rollout": rollouts}
    return " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)


def make_console() -> PipeConsole:
    """Where tables and trees are printed."""
    return PipeConsole(highlight=False, width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
