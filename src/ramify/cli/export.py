"""`ramify export RUN`: export a run's traces or conversations (--to), its model (--model) or adapter (--adapter).

`ramify push RUN` exports the model with a card beside it, and uploads both to a Hugging Face repository.
"""

import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ramify.cli.run_lookup import open_run_readonly
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.core.hub import get_endpoint
from ramify.core.names import format_count
from ramify.run.store import RunStore, export_run, wrap_storage_errors
from ramify.run.store.run_log import RunLog
from ramify.train.exported_models import export_adapter, export_model
from ramify.train.model_card import CURVE_NAME, CURVES_FILE, write_model_card

PROGRESS_INTERVAL = 2.0  # seconds between progress lines
TOKEN_VARIABLE = "HF_TOKEN"


def run(options: Namespace) -> int:
    """Write the run's traces or conversations to one file, or its model or adapter to a directory."""
    file = Path(options.file) if options.file else None
    if options.to != "sft" and not (options.best is None and options.min_reward is None):
        raise ConfigInvalid("--best and --min-reward choose the rollouts of --to sft")
    if options.best is not None and options.best < 1:
        raise ConfigInvalid(f"--best: expected at least 1, got {options.best}")
    if options.step and options.to:
        raise ConfigInvalid("--step chooses the model or adapter that is exported; give --model or --adapter instead")
    if options.dry_run and options.model is None:
        raise ConfigInvalid("--dry-run prints where --model is written; give --model too")
    if options.model is not None and file is not None:
        raise ConfigInvalid("-o is not used with --model, which names the directory")
    if options.model is not None:
        directory = Path(options.model) if options.model else None
        return _export_model(options.run, directory, options.step, dry_run=options.dry_run)
    if options.adapter:
        return _export_adapter(options.run, file, options.step)
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


def _export_adapter(run: str, directory: Path | None, step: str) -> int:
    with open_run_readonly(run) as store, wrap_storage_errors(directory or store.path):
        exported = export_adapter(store, directory, step)
    loading = f"load it with peft.PeftModel.from_pretrained(model, {str(exported.directory)!r})"
    print(f"adapter of step {exported.step} in {exported.directory}; {loading}")
    if exported.quantize:
        base = f"the base model quantized to {exported.quantize.removesuffix('bit')} bits"
        problem = f"this adapter was trained on {base}, so its outputs differ on the original weights"
        advice = f"`ramify export {shlex.quote(run)} --model` writes the quantized base with the adapter merged"
        print(f"note: {problem}; {advice}", file=sys.stderr)
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


def push(options: Namespace) -> int:
    """Print the directory of the model, and where it was uploaded to."""
    if options.private and options.repo is None:
        raise ConfigInvalid("--private is for an upload: add --repo ORG/NAME")
    with open_run_readonly(options.run) as store, wrap_storage_errors(store.path):
        exported = export_model(store, step=options.step)
        has_curves = _plot_curves(store, exported.directory / CURVES_FILE)
        card = write_model_card(store, exported, has_curves=has_curves)
    print(f"model of step {exported.step} in {exported.directory}, with its card {card.name}")
    if options.repo is None:
        run = shlex.quote(str(options.run))
        print(f"read the card; then upload both with: ramify push {run} --step {exported.step} --repo ORG/NAME")
        return 0
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigInvalid(f"{exported.directory} was not uploaded: set {TOKEN_VARIABLE} to a token with write access")
    print(f"uploaded to {_upload(exported.directory, options.repo, is_private=options.private)}")
    return 0


def _plot_curves(store: RunStore, path: Path) -> bool:
    """Plot the curves of the run; return whether there are any and matplotlib is installed."""
    points = [point for point in RunLog(store).metrics() if CURVE_NAME.fullmatch(point.name)]
    if not points:
        return False
    from ramify.cli.metrics import plot_metrics  # imports rich, which exports do not need

    try:
        plot_metrics({store.path.resolve().name: points}, path)
    except ConfigInvalid as error:
        print(f"the card has no curves: {error.message}")
        return False
    return True


def _upload(directory: Path, repo: str, *, is_private: bool) -> str:
    """Upload a directory to a model repository, which is created if it does not exist, and return its address."""
    from huggingface_hub import HfApi  # takes a second, and only an upload needs it

    endpoint = get_endpoint()
    api = HfApi(endpoint=endpoint, token=os.environ[TOKEN_VARIABLE])
    try:
        api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message=f"Upload {directory.name}")
    except Exception as error:  # the library passes on whatever its HTTP client raised
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ProviderError(f"{directory} was not uploaded to {repo} at {endpoint}: {problem}") from error
    return f"{endpoint}/{repo}"
