"""From a model's directory to a trainer: loaded, given adapters, sharded."""

from collections.abc import Callable
from pathlib import Path

import torch

from ramify.model.pack_layout import PackLayout, describe_pack_layout
from ramify.model.precision import DtypeChoice, choose_dtype
from ramify.model.tree_attention import describe_tree_attention
from ramify.train.batch import PackSpec
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks, apply_fsdp
from ramify.train.lora import add_adapters
from ramify.train.losses import load_loss
from ramify.train.policy import compile_layers, load_policy
from ramify.train.trainer import Trainer

CPU = torch.device("cpu")
FLAT_DESCRIPTION = "flat: every branch is computed whole"


def build_trainer(
    model_path: Path,
    config: TrainerConfig,
    ranks: Ranks,
    *,
    total_steps: int | None = None,
    seed: int = 0,
    flat: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Trainer:
    """The trainer of the model directory `path`, this rank's part of it; `tell` hears how it will compute.

    `flat` where no batch will share a prefix.
    """
    cuda, choice = ranks.device.type == "cuda", choose_trainer_dtype(config, ranks)
    policy = load_policy(
        model_path,
        load_loss(config.loss.id, config.loss.options),
        device=CPU
        if ranks.world_size > 1
        else ranks.device,  # sharding moves layer by layer: a GPU never holds all of it
        checkpoint_activations=config.checkpoint_activations,
    )
    log(FLAT_DESCRIPTION if flat else describe_pack_layout(policy.model.config))
    log(f"dtype: {choice}")
    uses_tree_attention = policy.layout is PackLayout.FOREST
    log(f"operators: {describe_tree_attention(ranks.device) if uses_tree_attention else 'those of the model'}")
    if config.lora.enabled:
        add_adapters(policy.model, config.lora, seed)
        policy.to(ranks.device if ranks.world_size == 1 else CPU)
    if cuda if config.compile is None else config.compile:
        compile_layers(policy)
    if ranks.world_size == 1:
        return Trainer(policy, config, total_steps=total_steps, dtype=choice.dtype)
    apply_fsdp(policy, ranks, choice.dtype)
    return Trainer(policy, config, total_steps=total_steps, merge_sums=ranks.merge_metric_sums)


def choose_trainer_dtype(config: TrainerConfig, ranks: Ranks) -> DtypeChoice:
    """Choose the type of the computation and of the published weights: an engine then computes what was trained."""
    if config.dtype != "auto":
        return choose_dtype(config.dtype, None, ranks.device)
    if ranks.device.type == "cpu":
        return DtypeChoice(torch.float32, "the default on a CPU")
    return DtypeChoice(torch.bfloat16, "the default on a GPU")


def get_pack_spec(trainer: Trainer) -> PackSpec:
    """How this trainer wants its packs."""
    cost = trainer.flops_model
    return PackSpec(
        layout=trainer.policy.layout,
        pack_tokens=trainer.config.pack_tokens,
        per_token=cost.per_token,
        per_pair=cost.per_visible_pair * len(cost.layer_windows),
    )
