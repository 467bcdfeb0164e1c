"""The models and adapters of a run, by step, as directories that other libraries load. Importable without torch.

Few versions of the published weights are kept, so the model is copied from there if its step is among them, and built
from the checkpoint of the step otherwise. The adapters of a LoRA run are merged into its base model in both cases.
"""

import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from ramify.core.config import CONFIG_FILE
from ramify.core.errors import CheckpointRefused, ConfigInvalid, WeightsRefused
from ramify.core.files import create_directory
from ramify.core.names import suggest
from ramify.model.resolve import WEIGHTS_NAME_PATTERN
from ramify.model.run_models import BEST_PREFIX, get_model_directory
from ramify.model.weights_manifest import MANIFEST_FILE, verify_weights
from ramify.run.fencing.token import FencingToken
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog
from ramify.train.checkpoint_manifest import (
    CHECKPOINTS_DIR,
    find_committed_checkpoint,
    list_completed_steps,
    list_saved_steps,
)
from ramify.train.config import find_best_step, read_run_config
from ramify.train.weights_directory import WEIGHTS_DIR


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that was exported, and whether the adapters of a LoRA run were merged into it."""

    step: int
    directory: Path
    is_merged: bool


def export_model(
    store: RunStore, directory: Path | None = None, step: str = "", *, dry_run: bool = False
) -> ExportedModel:
    """Write the model after a step to `directory`, by default to one for this step in the run, unless it exists there.

    `step` is a number, or `best:METRIC`; without it, the last step is exported. A `dry_run` writes nothing. Raises
    ConfigInvalid if a given directory exists or there is no such step, CheckpointRefused or WeightsRefused if files are
    damaged.
    """
    run = store.path
    if directory is not None and directory.exists():
        raise ConfigInvalid(f"{directory} already exists: remove it, or choose another directory")
    _, trainer = read_run_config(run / CONFIG_FILE)
    ledger, published = Ledger.open_readonly(store), _find_published(run / WEIGHTS_DIR)
    chosen = _choose_step(step, {*published, *list_saved_steps(run / CHECKPOINTS_DIR)}, store, ledger)
    target = directory or get_model_directory(run, chosen)
    if not dry_run and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_model(target, run, chosen, published, ledger)
        except (OSError, WeightsRefused):
            if directory is not None or not target.exists():
                raise  # otherwise another process has exported the same step meanwhile
    return ExportedModel(chosen, target, trainer.lora.enabled)


def _write_model(directory: Path, run: Path, step: int, published: Mapping[int, Path], ledger: Ledger) -> None:
    """Copy the published model of a step, or build it from published adapters or from the checkpoint of the step."""
    if step in published and verify_weights(published[step]).adapters is None:
        with create_directory(directory) as partial_path:
            shutil.copytree(published[step], partial_path, dirs_exist_ok=True)
        return
    from ramify.train.model_export import build_model  # loads torch

    checkpoint = None if step in published else _find_checkpoint(run, step, ledger)
    build_model(directory, run, step, checkpoint, published)


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """An exported adapter. `quantize` is the format of the base model that it was trained on, if it was quantized."""

    step: int
    directory: Path
    quantize: str | None


def export_adapter(store: RunStore, directory: Path | None = None, step: str = "") -> ExportedAdapter:
    """Write the adapter after a step for peft, by default to `adapter-STEP` in the run.

    `step` is as in `export_model`. Raises ConfigInvalid if the run trains no adapter, if the directory exists, or if
    the step is not stored, and CheckpointRefused if the checkpoint is damaged.
    """
    run = store.path
    model, trainer = read_run_config(run / CONFIG_FILE)
    if not trainer.lora.enabled:
        raise ConfigInvalid(f"{run} has no adapter: it was not trained with [trainer.lora]")
    ledger = Ledger.open_readonly(store)
    chosen = _choose_step(step, set(list_saved_steps(run / CHECKPOINTS_DIR)), store, ledger)
    target = directory or run / f"adapter-{chosen:06}"
    if target.exists():
        raise ConfigInvalid(f"{target} already exists: remove it, or choose another directory with -o")
    from ramify.train.model_export import write_adapter  # loads torch

    write_adapter(target, _find_checkpoint(run, chosen, ledger), trainer.lora, model.name)
    return ExportedAdapter(chosen, target, model.quantize)


def _find_checkpoint(run: Path, step: int, ledger: Ledger) -> Path:
    commit = ledger.get_commit(step)
    return find_committed_checkpoint(run / CHECKPOINTS_DIR, step, commit.directory if commit else "")


def _choose_step(step: str, stored_steps: Set[int], store: RunStore, ledger: Ledger) -> int:
    """Return the step that was asked for, one of the committed steps in `stored_steps`, by default the last.

    Raises ConfigInvalid if it is not available, and CheckpointRefused if the last step is not stored any more.
    """
    completed = {*stored_steps, *list_completed_steps(store.path / CHECKPOINTS_DIR)}
    committed = ledger.progress().committed or max(completed, default=0)
    available = sorted(number for number in stored_steps if 0 < number <= committed)
    if not available:
        raise ConfigInvalid(f"{store.path} has no checkpoint yet, so there is nothing to export")
    if not step:
        if available[-1] < committed:
            problem = f"the checkpoint of step {committed}, the last one, is missing or has no manifest"
            raise CheckpointRefused(f"{problem}; --step {available[-1]} exports an older one")
        return available[-1]
    listed = ", ".join(map(str, available))
    steps = f"stored steps of {store.path}: {listed}; checkpoint.keep_last, keep_best and keep_interval decide which"
    if not step.startswith(BEST_PREFIX):
        if not step.isdecimal() or int(step) not in available:
            raise ConfigInvalid(f"--step: expected one of the available steps or best:METRIC, got {step!r}; {steps}")
        return int(step)
    metric, run_log = step.removeprefix(BEST_PREFIX), RunLog(store)
    values = {point.step: point.value for point in run_log.metrics(metric)}
    if not values:
        known = sorted({point.name for point in run_log.metrics("eval/*") + run_log.metrics("reward/*")})
        raise ConfigInvalid(
            f"--step: the run has no metric {metric!r}; {suggest(metric, known, 'see `ramify metrics`')}"
        )
    best = find_best_step(metric, values, available)
    if best is None:
        raise ConfigInvalid(f"--step: {metric} was not measured at any available step; {steps}")
    return best


def _find_published(directory: Path) -> dict[int, Path]:
    """Return the published weights by step. If several trainers published a step, the newest trainer counts."""
    versions: list[tuple[FencingToken, int, Path]] = []
    for manifest in directory.glob(f"*/{MANIFEST_FILE}"):
        if match := WEIGHTS_NAME_PATTERN.fullmatch(manifest.parent.name):
            versions.append((FencingToken.parse(match[1]), int(match[2]), manifest.parent))
    return {step: path for _, step, path in sorted(versions)}
