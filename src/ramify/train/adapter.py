"""Export the adapter of a LoRA run as a directory that peft loads.

A checkpoint of such a run holds only the adapter's matrices, in float32. So the export reads the last committed
checkpoint, renames its matrices for peft, and takes rank and alpha from the run's configuration. It needs no model.
"""

import re
from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.core.files import create_directory
from ramify.model.resolve import is_hub_id, resolve_model_path
from ramify.model.weights import write_safetensors
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from ramify.train.checkpoint_manifest import find_committed_checkpoint, list_completed_steps, verify_checkpoint
from ramify.train.lora import ADAPTER_NAME, build_peft_config
from ramify.train.model_export import read_masters, read_run_config

WEIGHTS_FILE = "adapter_model.safetensors"  # the name peft looks for
_MATRIX_NAME_PATTERN = re.compile(rf"(?P<module>.+)\.(?P<side>lora_[AB])\.{ADAPTER_NAME}\.weight")


def export_adapter(store: RunStore, directory: Path | None = None) -> tuple[int, Path]:
    """Write the adapter of the last checkpoint; returns its step and the directory.

    Raises ConfigInvalid if the run trains no adapter or the directory exists, CheckpointRefused if the checkpoint is
    damaged.
    """
    run = store.path
    model_name, trainer = read_run_config(run / "config.toml")
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
    matches = {_MATRIX_NAME_PATTERN.fullmatch(name): matrix for name, matrix in read_masters(checkpoint).items()}
    tensors = {
        f"base_model.model.{match['module']}.{match['side']}.weight": matrix
        for match, matrix in matches.items()
        if match
    }
    with create_directory(directory) as partial_path:
        write_safetensors(partial_path / WEIGHTS_FILE, tensors)
        peft_config = build_peft_config(
            trainer.lora,
            sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors}),
            purpose="ramify export --adapter",
            inference_mode=True,
            task_type="CAUSAL_LM",
            base_model_name_or_path=model_name if is_hub_id(model_name) else str(resolve_model_path(model_name)),
        )
        peft_config.save_pretrained(str(partial_path))
    return step, directory
