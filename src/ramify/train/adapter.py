"""Export the adapter of a LoRA run as a directory that peft loads.

A checkpoint of such a run holds only the adapter's matrices, in float32. So the export reads the last committed
checkpoint, renames its matrices for peft, and takes rank and alpha from the run's configuration. It needs no model.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from ramify.config import to_new_keys
from ramify.errors import ConfigInvalid
from ramify.files import create_directory
from ramify.model.resolve import is_hub_id, resolve_model_path
from ramify.model.weights import write_safetensors
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from ramify.train.checkpoint import ignore_single_process_warning
from ramify.train.checkpoint_manifest import find_committed_checkpoint, list_completed_steps, verify_checkpoint
from ramify.train.checkpoint_metadata import MetadataReader
from ramify.train.config import LoraConfig
from ramify.train.lora import ADAPTER_NAME, build_peft_config

WEIGHTS_FILE = "adapter_model.safetensors"  # the name peft looks for
_MATRIX_KEY_PATTERN = re.compile(rf"model/model\.(?P<module>.+)\.(?P<side>lora_[AB])\.{ADAPTER_NAME}\.weight")


def export_adapter(store: RunStore, directory: Path | None = None) -> tuple[int, Path]:
    """Write the adapter of the last checkpoint; returns its step and the directory.

    Raises ConfigInvalid if the run trains no adapter or the directory exists, CheckpointRefused if the checkpoint is
    damaged.
    """
    run = store.path
    model_name, lora = _read_config(run / "config.toml")
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
    tensors = _read_matrices(checkpoint)
    with create_directory(directory) as partial_path:
        write_safetensors(partial_path / WEIGHTS_FILE, tensors)
        peft_config = build_peft_config(
            lora,
            sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors}),
            purpose="ramify export --adapter",
            inference_mode=True,
            task_type="CAUSAL_LM",
            base_model_name_or_path=model_name if is_hub_id(model_name) else str(resolve_model_path(model_name)),
        )
        peft_config.save_pretrained(str(partial_path))
    return step, directory


def _read_config(path: Path) -> tuple[str, LoraConfig]:
    """Read the name of the model and the settings of the adapter from a run's configuration."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        name = str(table["model"]["name"])
        lora = LoraConfig.model_validate(to_new_keys(LoraConfig, table["trainer"]["lora"]))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigInvalid(f"{path} does not say how the run was trained: {error}") from error
    if not lora.enabled:
        raise ConfigInvalid(f"{path.parent} has no adapter: it was not trained with trainer.lora.enabled = true")
    return name, lora


def _read_matrices(checkpoint: Path) -> dict[str, Tensor]:
    """Read the adapter's matrices under the names that peft gives them."""
    reader = MetadataReader(checkpoint)
    names: dict[str, str] = {}
    state: dict[str, Any] = {}
    for key, entry in reader.metadata.state_dict_metadata.items():
        if match := _MATRIX_KEY_PATTERN.fullmatch(key):
            names[key] = f"base_model.model.{match['module']}.{match['side']}.weight"
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    with ignore_single_process_warning():
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return {names[key]: tensor for key, tensor in state.items()}
