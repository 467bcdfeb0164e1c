"""Finds the run or the rollout that a command is given, and describes what a run has finished."""

import tomllib
from pathlib import Path

from ramify.cli.arguments import format_resume_command
from ramify.core.config import CONFIG_FILE
from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.core.names import format_count
from ramify.run.lookup import OUTPUT_DIR, find_run
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.ledger import Ledger


def open_run_readonly(name: str) -> RunStore:
    """Open the run with this name or path for reading."""
    return RunStore.open(find_run(name), write=False)


def find_rollout(store: RunStore, id_prefix: str) -> RolloutRecord:
    """Return the only rollout whose id is, or starts with, `id_prefix`."""
    rows = store.find_rollouts(id_prefix, limit=8)
    if len(rows) == 1:
        return rows[0]
    if rows:
        ids = ", ".join(row.id for row in rows)
        raise ConfigInvalid(f"{id_prefix!r} matches several rollouts: {ids}; give more of the id")
    raise ConfigInvalid(f"{store.path} has no rollout {id_prefix!r}; 'ramify show {store.path}' lists them")


def build_resume_command(path: Path) -> str | None:
    """Return the command that resumes an RL or SFT run from its stored configuration; None if it has none."""
    try:
        keys = tomllib.loads((path / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    is_moved = (
        Path(str(keys.get("output", OUTPUT_DIR))).resolve() != path.resolve().parent
    )  # or it was started elsewhere
    arguments = ["@", str(path / CONFIG_FILE), *(["-o", str(path.parent)] if is_moved else [])]
    return format_resume_command("rl" if "train" in keys else "sft", arguments)


def describe_resume(path: Path, command: str) -> str:
    """Return what an ended run has finished, and the command that resumes it.

    It is printed after the failure that ended the run, so it does not raise if the run cannot be read.
    """
    try:
        progress = _describe_progress(path)
    except RamifyError:
        return f"finished work is kept; resume with: {command}"
    return f"{progress} kept; resume with: {command}" if progress else f"nothing is finished yet; rerun: {command}"


def _describe_progress(path: Path) -> str:
    """Return what is in a run, such as "3 steps and 40 rollouts"; "" for a run without rollouts or without an index."""
    if not (path / DATABASE_NAME).is_file():
        return ""
    with RunStore.open(path, write=False) as store:
        ((rollouts,),) = store.select("SELECT count(*) FROM rollouts")
        steps = Ledger.open_readonly(store).progress().committed if Ledger.exists_in(store) else 0
    counts = {"step": steps, "rollout": rollouts}
    return " and ".join(format_count(count, name) for name, count in counts.items() if count)
