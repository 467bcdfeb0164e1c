"""`ramify rollback RUN STEP`: resume a run from an older checkpoint, for example if the newest one is damaged."""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import Generator
from functools import partial
from pathlib import Path

from ramify.cli.run_lookup import build_resume_command, find_run
from ramify.core.errors import CheckpointRefused, ConfigInvalid, RamifyError
from ramify.core.files import unless_abandoned
from ramify.launch.completion import FINISHED_KEY
from ramify.launch.head import check_newest_head
from ramify.launch.shared_storage import call_storage_blocking, get_transfer_timeout
from ramify.run.store import RunStore, wrap_storage_errors
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import build_event_change
from ramify.run.store.run_store import build_fact_change
from ramify.train.checkpoint_manifest import (
    find_committed_checkpoint,
    list_checkpoints,
    list_completed_steps,
    parse_checkpoint_name,
    verify_checkpoint,
)

CLOSE_TIMEOUT = 5.0  # seconds to close a run after an error; its storage may hang


def run(options: Namespace) -> int:
    """Verify the checkpoint, end the run's history there, and rename newer checkpoints."""
    with wrap_storage_errors(Path(options.run)):
        path = call_storage_blocking(partial(find_run, options.run), options.run)
        check_newest_head(path)
        checkpoints = path / "checkpoints"  # perhaps on shared storage, which may hang
        steps = call_storage_blocking(partial(list_completed_steps, checkpoints), checkpoints)
    if options.step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise CheckpointRefused(f"{path} has no checkpoint of step {options.step}; checkpoints of the run: {existing}")
    with _open_store(path) as store, wrap_storage_errors(path):
        ledger = call_storage_blocking(partial(Ledger.open, store), path)
        commit = call_storage_blocking(partial(ledger.get_commit, options.step), path)  # an SFT run has none
        commit_dir = commit.directory if commit is not None else ""
        find_checkpoint = partial(find_committed_checkpoint, checkpoints, options.step, commit_dir)
        checkpoint_dir = call_storage_blocking(find_checkpoint, checkpoints)
        num_bytes = call_storage_blocking(partial(_count_bytes, checkpoint_dir), checkpoint_dir)
        verify, timeout = partial(verify_checkpoint, checkpoint_dir), get_transfer_timeout(num_bytes)
        call_storage_blocking(verify, checkpoint_dir, timeout=timeout)
        committed = call_storage_blocking(partial(_roll_back_ledger, ledger, options.step, checkpoint_dir), path)
        renamed = call_storage_blocking(partial(_rename_newer, checkpoints, options.step), checkpoints)
    command = build_resume_command(path)
    advice = f"resume with: {command}" if command else "rerun the command that started it"
    print(f"{path} is rolled back to step {options.step}; {advice}")
    if committed > options.step:
        print(f"steps {options.step} to {committed - 1} are trained again, on the same batches")
    for checkpoint in renamed:
        print(f"kept; remove it when you do not need it: {checkpoint}")
    return 0


@contextlib.contextmanager
def _open_store(path: Path) -> Generator[RunStore]:
    """Open the run, and close it when the block ends, both with a deadline. An error of the block is kept."""
    store = call_storage_blocking(partial(RunStore.open, path), path)
    try:
        yield store
    except BaseException:
        with contextlib.suppress(RamifyError), wrap_storage_errors(path):
            call_storage_blocking(store.close, path, timeout=CLOSE_TIMEOUT)
        raise
    with wrap_storage_errors(path):
        call_storage_blocking(store.close, path)


def _count_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*"))


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


def _rename_newer(directory: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that the run does not load them, and return their new paths."""
    renamed: list[Path] = []
    for checkpoint in list_checkpoints(directory):
        name, number = parse_checkpoint_name(checkpoint.name), 1
        if name is None or name[0] <= step:
            continue
        while (target := directory / f"rolled_back_{number}.{checkpoint.name}").exists():
            number += 1
        with unless_abandoned():
            renamed.append(checkpoint.rename(target))
    return renamed
