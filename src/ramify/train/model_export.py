"""Build the model of a run from a checkpoint or from published adapters, and export its adapter for peft."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from ramify.core.config import CONFIG_FILE
from ramify.core.files import create_directory, write_and_fsync
from ramify.core.hub import is_hub_id
from ramify.model.kernels.quantization import QuantizeMode, dequantize_matrix, quantize_matrix
from ramify.model.load import load_config, load_hf_model
from ramify.model.lora import ADAPTER_NAME, get_adapter_names, is_adapter_weight, merge_adapter
from ramify.model.resolve import fetch_model, resolve_model_path
from ramify.model.weights import get_untied_tensors, publish_weights, write_safetensors
from ramify.trace.version import PolicyVersion
from ramify.train.checkpoint import ignore_single_process_warning
from ramify.train.checkpoint_manifest import verify_checkpoint
from ramify.train.checkpoint_metadata import MetadataReader
from ramify.train.config import LoraConfig, TrainerConfig, read_run_config
from ramify.train.master_weights import round_to_bfloat16

MASTER_PREFIX = "model/model."  # of the keys of master weights in a checkpoint


def build_model(directory: Path, run: Path, step: int, checkpoint: Path | None, published: Mapping[int, Path]) -> None:
    """Write the model of a step to `directory`: from its checkpoint, or if that is None from its published adapters."""
    model, trainer = read_run_config(run / CONFIG_FILE)
    base_model = fetch_model(model.name)
    dtype = _find_dtype(base_model, trainer, list(published.values()))
    if checkpoint is None:
        tensors = get_untied_tensors(load_hf_model(published[step], load_config(base_model), dtype, None))
    else:
        tensors = _build_tensors(checkpoint, base_model, trainer, dtype, model.quantize)
    publish_weights(directory, tensors, PolicyVersion(run.name, 0, step), base_model=base_model)


def _find_dtype(base_model: Path, trainer: TrainerConfig, published: list[Path]) -> torch.dtype:
    """Return the dtype in which the run publishes its weights."""
    if trainer.dtype != "auto":
        return getattr(torch, trainer.dtype)
    config_dir = published[-1] if published else base_model
    config = json.loads((config_dir / "config.json").read_text("utf-8"))
    tables = (config, config.get("text_config") or {})  # a vision-language model may have it in the latter only
    names = (table.get(key) for table in tables for key in ("dtype", "torch_dtype"))
    return getattr(torch, next(filter(None, names), "float32"))


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


def write_adapter(directory: Path, checkpoint: Path, lora: LoraConfig, model_name: str) -> None:
    """Write the adapter of a checkpoint to `directory`, for peft.

    A checkpoint of a LoRA run holds only the adapter's matrices, in float32, so no model is needed. Raises
    CheckpointRefused if the checkpoint is damaged.
    """
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
        table = build_peft_config(lora, model_name, list(tensors))
        write_and_fsync(partial_path / ADAPTER_CONFIG_FILE, json.dumps(table, indent=2).encode())


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
