"""LoRA: a small correction beside each matrix is trained, the matrix itself stays as it was.

The adapters are put into the model in place, so everything around it (layers, head, tree attention, sharding) sees the
model it knows. Their product is added to the matrix only when weights are published: engines get an ordinary model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ramify.errors import ConfigInvalid
from ramify.train.config import LoraConfig

ADAPTER_NAME = "default"
BASE_LAYER_SUFFIX = ".base_layer"


def add_adapters(model: Any, config: LoraConfig, seed: int) -> None:
    """Put adapters into the model and freeze the rest. The same seed gives the same adapters on every rank."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigInvalid("trainer.lora needs peft: pip install 'ramify[lora]'") from error
    known = list_linear_names(model)
    if unknown := [name for name in config.targets if name not in known]:
        raise ConfigInvalid(f"trainer.lora.targets: there is no {unknown[0]!r} in the layers, but {', '.join(known)}")
    targets = config.targets or known
    asked = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(asked, model, ADAPTER_NAME)


def list_linear_names(model: Any) -> list[str]:
    """The linear maps inside the layers by the last part of their names, such as `q_proj`."""
    layers: nn.Module = model.get_decoder().layers
    return sorted({name.rpartition(".")[2] for name, each in layers.named_modules() if isinstance(each, nn.Linear)})


def is_adapter_weight(name: str) -> bool:
    """Whether a name in a state dict is an adapter's."""
    return ".lora_" in name


def strip_base_layer_suffix(name: str) -> str:
    """The name of a matrix before it got an adapter."""
    return name.replace(BASE_LAYER_SUFFIX, "")


def merge_adapter(name: str, matrix: Tensor, adapters: dict[str, Tensor], scaling: float) -> Tensor:
    """The matrix with its adapter's product added, in float32; itself where it has none.

    `named` gives adapters by their names in the state dict.
    """
    if not name.endswith(f"{BASE_LAYER_SUFFIX}.weight"):
        return matrix
    stem = name.partition(BASE_LAYER_SUFFIX)[0]
    down, up = (adapters[f"{stem}.lora_{side}.{ADAPTER_NAME}.weight"].float() for side in "AB")
    return matrix.float() + scaling * (up @ down)
