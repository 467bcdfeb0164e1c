"""Export the model of a run after some step, as a directory that transformers and vLLM load.

Few versions of the published weights are kept, so the model is copied from there if its step is among them, and built
from the checkpoint of the step otherwise. The adapters of a LoRA run are merged into its base model in both cases.
"""

import json
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from ramify.core.config import CONFIG_FILE
from ramify.core.errors import ConfigInvalid
from ramify.core.files import create_directory, write_and_fsync
from ramify.core.names import suggest
from ramify.model.load import load_config, load_hf_model
from ramify.model.lora import ADAPTER_NAME, get_adapter_names, is_adapter_weight, merge_adapter
from ramify.model.quantization import QuantizeMode, dequantize_matrix, quantize_matrix
from ramify.model.resolve import WEIGHTS_NAME_PATTERN, fetch_model, is_hub_id, resolve_model_path
from ramify.model.weights import get_untied_tensors, publish_weights, write_safetensors
from ramify.model.weights_manifest import MANIFEST_FILE, verify_weights
from ramify.run.fencing.token import FencingToken
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog
from ramify.trace.version import PolicyVersion
from ramify.train.checkpoint import ignore_single_process_warning
from ramify.train.checkpoint_manifest import (
    CHECKPOINTS_DIR,
    find_committed_checkpoint,
    list_completed_steps,
    list_saved_steps,
    verify_checkpoint,
)
from ramify.train.checkpoint_metadata import MetadataReader
from ramify.train.config import LoraConfig, TrainedModelConfig, TrainerConfig
from ramify.train.master_weights import round_to_bfloat16
from ramify.train.weights_directory import WEIGHTS_DIR

MASTER_PREFIX = "model/model."  # of the keys of master weights in a checkpoint
BEST_PREFIX = "best:"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that was exported, and whether the adapters of a LoRA run were merged into it."""

    step: int
    directory: Path
    is_merged: bool


def export_model(store: RunStore, directory: Path, step: str = "") -> ExportedModel:
    """Write the model after a step to `directory`.

    `step` is a number, or `best:METRIC`; without it, the last step is exported. Raises ConfigInvalid if the directory
    exists or there is no such step, CheckpointRefused or WeightsRefused if files are damaged.
    """
    run = store.path
    if directory.exists():
        raise ConfigInvalid(f"{directory} already exists: remove it, or choose another directory")
    model, trainer = read_run_config(run / CONFIG_FILE)
    ledger = Ledger.open_readonly(store)
    published, checkpoint_steps = _find_published(run / WEIGHTS_DIR), list_saved_steps(run / CHECKPOINTS_DIR)
    committed = ledger.progress().committed or max(checkpoint_steps, default=0)
    available = sorted(number for number in {*published, *checkpoint_steps} if 0 < number <= committed)
    if not available:
        raise ConfigInvalid(f"{run} has no checkpoint yet, so there is no model to export")
    chosen = _choose_step(step, available, store)
    if chosen in published and verify_weights(published[chosen]).adapters is None:
        with create_directory(directory) as partial_path:
            shutil.copytree(published[chosen], partial_path, dirs_exist_ok=True)
    else:
        base_model = fetch_model(model.name)
        dtype = _find_dtype(base_model, trainer, list(published.values()))
        if chosen in published:
            tensors = get_untied_tensors(load_hf_model(published[chosen], load_config(base_model), dtype, None))
        else:
            commit = ledger.get_commit(chosen)
            checkpoint = find_committed_checkpoint(run / CHECKPOINTS_DIR, chosen, commit.directory if commit else "")
            tensors = _build_tensors(checkpoint, base_model, trainer, dtype, model.quantize)
        publish_weights(directory, tensors, PolicyVersion(run.name, 0, chosen), base_model=base_model)
    return ExportedModel(chosen, directory, trainer.lora.enabled)


def _choose_step(step: str, available: list[int], store: RunStore) -> int:
    """Return the step that was asked for. Raises ConfigInvalid if it is not available."""
    if not step:
        return available[-1]
    steps = f"steps of {store.path} with a model: {', '.join(map(str, available))} (checkpoint.keep_last)"
    if not step.startswith(BEST_PREFIX):
        if not step.isdecimal() or int(step) not in available:
            raise ConfigInvalid(f"--step: expected one of the available steps or best:METRIC, got {step!r}; {steps}")
        return int(step)
    metric, run_log = step.removeprefix(BEST_PREFIX), RunLog(store)
    sign = -1 if metric.endswith("loss") else 1
    values = {point.step: sign * point.value for point in run_log.metrics(metric)}
    if not values:
        known = sorted({point.name for point in run_log.metrics("eval/*") + run_log.metrics("reward/*")})
        raise ConfigInvalid(
            f"--step: the run has no metric {metric!r}; {suggest(metric, known, 'see `ramify metrics`')}"
        )
    measured = [number for number in available if number in values]
    if not measured:
        raise ConfigInvalid(f"--step: {metric} was not measured at any available step; {steps}")
    return max(measured, key=lambda number: (values[number], number))


def _find_published(directory: Path) -> dict[int, Path]:
    """Return the published weights by step. If several trainers published a step, the newest trainer counts."""
    versions: list[tuple[FencingToken, int, Path]] = []
    for manifest in directory.glob(f"*/{MANIFEST_FILE}"):
        if match := WEIGHTS_NAME_PATTERN.fullmatch(manifest.parent.name):
            versions.append((FencingToken.parse(match[1]), int(match[2]), manifest.parent))
    return {step: path for _, step, path in sorted(versions)}


def read_run_config(path: Path) -> tuple[TrainedModelConfig, TrainerConfig]:
    """Read the model and the settings of the trainer from a run's configuration."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        model = TrainedModelConfig.model_validate(table["model"])
        return model, TrainerConfig.model_validate(table.get("trainer", {}))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigInvalid(f"{path} does not say how the run was trained: {error}") from error


def _find_dtype(base_model: Path, trainer: TrainerConfig, published: list[Path]) -> torch.dtype:
    """Return the dtype in which the run publishes its weights."""
    if trainer.dtype != "auto":
        return getattr(torch, trainer.dtype)
    config_dir = published[-1] if published else base_model
    table = json.loads((config_dir / "config.json").read_text("utf-8"))
    name = table.get("dtype") or table.get("torch_dtype") or "float32"
    return getattr(torch, str(name))


def _build_tensors(
    checkpoint: Path, base_model: Path, trainer: TrainerConfig, dtype: torch.dtype, quantize: QuantizeMode | None
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by their names in the base model, with adapters merged.

    If the adapters were trained beside quantized weights, they are merged into these.
    """
    verify_checkpoint(checkpoint)
    masters = MasterReader(checkpoint)
    adapters = {name: masters.read(name) for name in masters.names if is_adapter_weight(name)}
    scaling = trainer.lora.alpha / trainer.lora.rank
    tensors: dict[str, Tensor] = {}
    for name, tensor in get_untied_tensors(load_hf_model(base_model, load_config(base_model), dtype, None)).items():
        matrix = masters.read(name) if name in masters.names else tensor.detach()
        if get_adapter_names(name)[0] in adapters:
            matrix = dequantize_matrix(quantize_matrix(matrix, quantize)) if quantize else matrix
            matrix = merge_adapter(name, matrix, adapters, scaling)
        elif name in masters.names and dtype == torch.bfloat16:
            matrix = round_to_bfloat16(matrix)
        tensors[name] = matrix.to(dtype)
    return tensors


class MasterReader:
    """Reads the trained weights of a checkpoint one by one, in float32, without the state of the optimizer."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = MetadataReader(checkpoint)
        keys = self._reader.metadata.state_dict_metadata
        self.names = {key.removeprefix(MASTER_PREFIX) for key in keys if key.startswith(MASTER_PREFIX)}

    def read(self, name: str) -> Tensor:
        """Return a weight by its name in the model."""
        key = f"{MASTER_PREFIX}{name}"
        entry: Any = self._reader.metadata.state_dict_metadata[key]
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with ignore_single_process_warning():
            state_dict_loader.load(state, storage_reader=self._reader, no_dist=True)
        return state[key]


WEIGHTS_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"  # the names peft looks for
_MATRIX_NAME_PATTERN = re.compile(rf"(?P<module>.+)\.(?P<side>lora_[AB])\.{ADAPTER_NAME}\.weight")


def export_adapter(store: RunStore, directory: Path | None = None) -> tuple[int, Path]:
    """Write the adapter of the last committed checkpoint for peft; return its step and the directory.

    A checkpoint of a LoRA run holds only the adapter's matrices, in float32, so no model is needed. Raises
    ConfigInvalid if the run trains no adapter or the directory exists, CheckpointRefused if the checkpoint is damaged.
    """
    run = store.path
    model, trainer = read_run_config(run / CONFIG_FILE)
    if not trainer.lora.enabled:
        raise ConfigInvalid(f"{run} has no adapter: it was not trained with [trainer.lora]")
    ledger = Ledger.open_readonly(store)
    step = ledger.progress().committed or max(list_completed_steps(run / "checkpoints"), default=0)
    if not step:
        raise ConfigInvalid(f"{run} has no checkpoint yet, so there is no adapter to export")
    commit = ledger.get_commit(step)
    checkpoint = find_committed_checkpoint(run / "checkpoints", step, commit.directory if commit else "")
    directory = directory or run / f"adapter-{step:06}"
    if directory.exists():
        raise ConfigInvalid(f"{directory} already exists: remove it, or choose another directory with -o")
    verify_checkpoint(checkpoint)
    masters = MasterReader(checkpoint)
    matches = {_MATRIX_NAME_PATTERN.fullmatch(name): masters.read(name) for name in sorted(masters.names)}
    tensors = {
        f"base_model.model.{match['module']}.{match['side']}.weight": matrix
        for match, matrix in matches.items()
        if match
    }
    with create_directory(directory) as partial_path:
        write_safetensors(partial_path / WEIGHTS_FILE, tensors)
        table = build_peft_config(trainer.lora, model.name, list(tensors))
        write_and_fsync(partial_path / ADAPTER_CONFIG_FILE, json.dumps(table, indent=2).encode())
    return step, directory


def build_peft_config(lora: LoraConfig, model_name: str, tensor_names: Sequence[str]) -> dict[str, Any]:
    """Return what peft and vLLM read from `adapter_config.json` for an adapter with these tensors."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name if is_hub_id(model_name) else str(resolve_model_path(model_name)),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensor_names}),
        "inference_mode": True,
    }
