"""LoRA: train a low-rank adapter beside each matrix while the matrix itself stays fixed.

The adapters are injected into the model in place, so layers, head, tree attention and sharding see the model they know.
Their product is added to the matrix only when weights are published: engines load an ordinary model.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ramify.core.errors import ConfigInvalid
from ramify.train.config import LoraConfig

ADAPTER_NAME = "default"
BASE_LAYER_SUFFIX = ".base_layer"


def add_adapters(model: Any, config: LoraConfig, seed: int) -> None:
    """Inject adapters into the model and freeze the rest. The same seed gives the same adapters on every rank.

    Raises ConfigInvalid if peft is not installed or a target does not exist.
    """
    layers: nn.Module = model.get_decoder().layers
    linear_maps = {module for module in layers.modules() if isinstance(module, nn.Linear)}
    names = [name for name, module in model.named_modules() if module in linear_maps]  # without the vision tower's
    known = sorted({name.rpartition(".")[2] for name in names})  # such as `q_proj`
    if unknown := [name for name in config.target_modules if name not in known]:
        problem = f"the layers have no {unknown[0]!r}; they have {', '.join(known)}"
        raise ConfigInvalid(problem, key="trainer.lora.target_modules")
    targets = [name for name in names if name.rpartition(".")[2] in (config.target_modules or known)]
    peft_config = build_peft_config(config, targets, purpose="trainer.lora")
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, ADAPTER_NAME)


def build_peft_config(config: LoraConfig, target_modules: list[str], *, purpose: str, **settings: Any) -> Any:
    """Return peft's configuration of the adapter. Raises ConfigInvalid, with the purpose, if peft is not installed."""
    try:
        from peft import LoraConfig as PeftConfig
    except ImportError as error:
        raise ConfigInvalid(f"{purpose} needs peft: pip install 'ramify[lora]'") from error
    return PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=target_modules, lora_dropout=0.0, **settings
    )


@contextmanager
def disable_adapters(model: nn.Module) -> Generator[None]:
    """Run the block with the model that training started from. Raises ConfigInvalid if the model has no adapters."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    if not layers:
        raise ConfigInvalid(
            "a batch needs the logprobs of the starting model, which a trainer has only with lora.enabled"
        )
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def is_adapter_weight(name: str) -> bool:
    """Return whether a name in a state dict belongs to an adapter."""
    return ".lora_" in name


def merge_adapter(name: str, matrix: Tensor, adapters: dict[str, Tensor], scaling: float) -> Tensor:
    """Return the matrix plus its adapter's product, in float32; the matrix itself if it has no adapter.

    `adapters` maps names in the state dict to the adapters' matrices.
    """
    if not name.endswith(f"{BASE_LAYER_SUFFIX}.weight"):
        return matrix
    stem = name.partition(BASE_LAYER_SUFFIX)[0]
    down, up = (adapters[f"{stem}.lora_{side}.{ADAPTER_NAME}.weight"].float() for side in "AB")
    return matrix.float() + scaling * (up @ down)
