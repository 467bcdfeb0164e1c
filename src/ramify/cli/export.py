"""`ramify export RUN`: export a run's traces or conversations (--to), its model (--model) or adapter (--adapter)."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ramify.cli.run_lookup import open_run_readonly
from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.run.store import export_run, wrap_storage_errors
from ramify.train.exported_models import export_model

PROGRESS_INTERVAL = 2.0  # seconds between progress lines


def run(options: Namespace) -> int:
    """Write the run's traces or conversations to one file, or its model or adapter to a directory."""
    file = Path(options.file) if options.file else None
    if options.to != "sft" and not (options.best is None and options.min_reward is None):
        raise ConfigInvalid("--best and --min-reward choose the rollouts of --to sft")
    if options.best is not None and options.best < 1:
        raise ConfigInvalid(f"--best: expected at least 1, got {options.best}")
    if options.step and options.model is None:
        raise ConfigInvalid("--step chooses the model that is exported; give --model too")
    if options.dry_run and options.model is None:
        raise ConfigInvalid("--dry-run prints where --model is written; give --model too")
    if options.model is not None and file is not None:
        raise ConfigInvalid("-o is not used with --model, which names the directory")
    if options.model is not None:
        directory = Path(options.model) if options.model else None
        return _export_model(options.run, directory, options.step, dry_run=options.dry_run)
    if options.adapter:
        return _export_adapter(options.run, file)
    if options.to == "sft":
        return _export_conversations(options.run, file, options.best or 1, options.min_reward)
    with open_run_readonly(options.run) as store:
        path = file or store.path / f"export.{options.to}"
        with wrap_storage_errors(path):
            count = export_run(store, options.to, path, make_progress_reporter())
    print(f"{count} traces in {path}")
    return 0


def make_progress_reporter() -> Callable[[int, int], None]:
    """Return a function that prints the number of exported rollouts to stderr, every PROGRESS_INTERVAL seconds."""
    last_time = time.monotonic()
    in_place = sys.stderr.isatty()

    def report(done: int, total: int) -> None:
        nonlocal last_time
        now = time.monotonic()
        if now - last_time >= PROGRESS_INTERVAL or (in_place and done == total):
            last_time = now
            end = "\r" if in_place and done < total else "\n"
            print(f"{done:,} of {total:,} rollouts exported", end=end, file=sys.stderr, flush=True)

    return report


def _export_conversations(run: str, file: Path | None, best: int, min_reward: float | None) -> int:
    from ramify.train.sft.export import export_conversations

    with open_run_readonly(run) as store:
        path, report = file or store.path / "sft.jsonl", make_progress_reporter()
        with wrap_storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            count = export_conversations(store, path, best=best, min_reward=min_reward, report_progress=report)
    print(f"{format_count(count, 'conversation')} in {path}; train on them with: ramify sft -d {path}")
    return 0


def _export_adapter(run: str, directory: Path | None) -> int:
    from ramify.train.model_export import export_adapter  # loads torch

    with open_run_readonly(run) as store, wrap_storage_errors(directory or store.path):
        step, directory = export_adapter(store, directory)
    print(
        f"adapter of step {step} in {directory}; load it with peft.PeftModel.from_pretrained(model, {str(directory)!r})"
    )
    return 0


def _export_model(run: str, directory: Path | None, step: str, *, dry_run: bool) -> int:
    """Print the directory alone to stdout, for other programs, and what it is to stderr."""
    with open_run_readonly(run) as store, wrap_storage_errors(directory or store.path):
        exported = export_model(store, directory, step, dry_run=dry_run)
    merged = " (adapters merged; --adapter exports them alone)" if exported.is_merged else ""
    advice = f"serve it with: ramify serve -m {exported.directory}"
    summary = "dry run: nothing was written" if dry_run else f"model of step {exported.step}{merged}; {advice}"
    print(summary, file=sys.stderr)
    print(exported.directory)
    return 0
