"""`ramify rollback RUN STEP`: resume a run from an older checkpoint, for example if the newest one is damaged.

Models that were exported from later steps are renamed like the checkpoints, so that `ramify export` and `run:NAME@STEP`
do not take them for the models of the steps that are trained again. Evals after the step are run again, too.
"""

import asyncio
from argparse import Namespace
from functools import partial
from pathlib import Path

from ramify.cli.run_lookup import build_resume_command
from ramify.core.errors import CheckpointRefused, ConfigInvalid
from ramify.core.interactive import call_interruptible
from ramify.launch.head import check_newest_head
from ramify.launch.run_directory import FINISHED_KEY
from ramify.model.run_models import MODELS_DIR, find_model_step
from ramify.run.lookup import find_run
from ramify.run.store import RunStore, storage_call, wrap_storage_errors
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import build_eval_removal, build_event_change
from ramify.run.store.run_store import build_fact_change
from ramify.train.checkpoint_manifest import (
    CHECKPOINTS_DIR,
    find_committed_checkpoint,
    get_checkpoint_step,
    list_checkpoints,
    list_completed_steps,
    verify_checkpoint,
)


def run(options: Namespace) -> int:
    """Verify the checkpoint, end the run's history there, and rename newer checkpoints and models."""
    path, committed, renamed = call_interruptible(partial(_roll_back, options.run, options.step), "rollback")
    command = build_resume_command(path)
    advice = f"resume with: {command}" if command else "rerun the command that started it"
    print(f"{path} is rolled back to step {options.step}; {advice}")
    if committed > options.step:
        print(f"steps {options.step} to {committed - 1} are trained again, on the same batches")
    for directory in renamed:
        print(f"kept; remove it when you do not need it: {directory}")
    return 0


def _roll_back(run: str, step: int) -> tuple[Path, int, list[Path]]:
    """Roll a run back; return its path, the step at which its history ended, and the renamed directories."""
    with storage_call(Path(run)):
        path = find_run(run)
        check_newest_head(path)
        checkpoints = path / CHECKPOINTS_DIR
        steps = list_completed_steps(checkpoints)
    if step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise CheckpointRefused(f"{path} has no checkpoint of step {step}; checkpoints of the run: {existing}")
    with RunStore.open(path) as store, wrap_storage_errors(path):
        ledger = Ledger.open(store)
        commit = ledger.get_commit(step)  # an SFT run has none
        commit_dir = commit.directory if commit is not None else ""
        checkpoint_dir = find_committed_checkpoint(checkpoints, step, commit_dir)
        verify_checkpoint(checkpoint_dir)
        committed = _roll_back_ledger(ledger, step, checkpoint_dir)
        store.submit_change(build_eval_removal(step)).result()
        return path, committed, _rename_newer(path, step)


def _roll_back_ledger(ledger: Ledger, step: int, checkpoint: Path) -> int:
    """End the history at `step`, and return the step at which it ended before; 0 for an SFT run, which has none."""
    store, committed = ledger.store, ledger.progress().committed
    if 0 < committed < step:
        raise ConfigInvalid(f"{store.path}: the history ends at step {committed}; give that step or an earlier one")
    if committed > step:  # one transaction, so that a repeated command finds all of it or nothing
        changes = [build_event_change("rolled_back", committed=committed, step=step)]
        if (store.get_fact(FINISHED_KEY) or 0) > step:
            changes.append(build_fact_change(FINISHED_KEY, None))
        asyncio.run(ledger.roll_back(step, checkpoint.name, *changes))
    return committed


def _rename_newer(run: Path, step: int) -> list[Path]:
    """Rename the checkpoints and the exported models after `step`, so that they are not used; return the new paths."""
    saved = [(get_checkpoint_step(path), path) for path in list_checkpoints(run / CHECKPOINTS_DIR)]
    models = [(number, path) for path in sorted((run / MODELS_DIR).glob("*")) if (number := find_model_step(run, path))]
    return [_rename_aside(path) for number, path in [*saved, *models] if number > step]


def _rename_aside(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"rolled_back_{number}.{path.name}")).exists():
        number += 1
    return path.rename(target)
