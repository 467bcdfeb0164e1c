"""`ramify rollback RUN STEP`: resume a run from an older checkpoint, for example if the newest one is damaged."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cli.parser import CommandParser

if TYPE_CHECKING:
    from ramify.store import RunStore


def run(argv: Sequence[str]) -> int:
    """Verify the checkpoint, end the run's history there, and rename newer checkpoints."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import find_run  # loaded here, not for help
    from ramify.errors import CheckpointRefused
    from ramify.store import RunStore, wrap_storage_errors
    from ramify.train.checkpoint_manifest import get_step_directory, list_completed_steps, verify_checkpoint

    path = find_run(options.run)
    checkpoint_dir = get_step_directory(path / "checkpoints", options.step)
    if not checkpoint_dir.is_dir():
        steps = ", ".join(map(str, list_completed_steps(path / "checkpoints")))
        raise CheckpointRefused(f"{checkpoint_dir} does not exist; checkpoints of the run: {steps or 'none'}")
    with RunStore.open(path) as store:
        if verify_checkpoint(checkpoint_dir).files is None:
            raise CheckpointRefused(f"{checkpoint_dir} has no checksums and cannot be verified; give another step")
        committed = _roll_back_ledger(store, options.step)
        with wrap_storage_errors(path):
            renamed = _rename_newer(path / "checkpoints", options.step)
    print(f"{path} resumes from step {options.step}; rerun the command that started it")
    if committed > options.step:
        print(f"steps {options.step} to {committed - 1} are trained again, on the same batches")
    for checkpoint in renamed:
        print(f"kept; remove it when you do not need it: {checkpoint}")
    return 0


def _roll_back_ledger(store: "RunStore", step: int) -> int:
    """End the history at `step`, and return the step at which it ended before; 0 for an SFT run, which has none."""
    from ramify.errors import ConfigInvalid
    from ramify.launch.completion import FINISHED_KEY
    from ramify.store.ledger import Ledger
    from ramify.store.run_log import RunLog

    ledger = Ledger.open(store)
    committed = ledger.progress().committed
    if 0 < committed < step:
        raise ConfigInvalid(f"{store.path}: the history ends at step {committed}; give that step or an earlier one")
    if committed > step:
        asyncio.run(ledger.roll_back(step))
        RunLog(store).log_event("rolled_back", committed=committed, step=step)
        if (store.get_fact(FINISHED_KEY) or 0) > step:
            store.set_fact(FINISHED_KEY, None)
    return committed


def _rename_newer(directory: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that the run does not load them, and return their new paths."""
    from ramify.train.checkpoint_manifest import get_step_directory, list_completed_steps

    renamed: list[Path] = []
    for newer_step in (completed for completed in list_completed_steps(directory) if completed > step):
        checkpoint, number = get_step_directory(directory, newer_step), 1
        while (target := directory / f"rolled_back_{number}.{checkpoint.name}").exists():
            number += 1
        renamed.append(checkpoint.rename(target))
    return renamed


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("rollback")
    parser.add_run_argument("run directory, or name of a run in ./outputs; it must not be running")
    parser.add_argument("step", metavar="STEP", type=int, help="step of the checkpoint to resume from")
    return parser
