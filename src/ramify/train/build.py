"""From a model's directory to a trainer: loaded, given adapters, sharded."""

from collections.abc import Callable
from pathlib import Path

import torch

from ramify.model.pack_layout import describe_pack_layout
from ramify.model.precision import DtypeChoice, choose_dtype
from ramify.train.batches import Laying
from ramify.train.config import TrainerConfig
from ramify.train.lora import add_adapters
from ramify.train.losses import find_loss
from ramify.train.parallel import Ranks, shard
from ramify.train.policy import compile_layers, load_policy
from ramify.train.step import Trainer

CPU = torch.device("cpu")
FLAT = "flat: every branch is computed whole"


def build_trainer(
    path: Path,
    config: TrainerConfig,
    ranks: Ranks,
    *,
    steps: int | None = None,
    seed: int = 0,
    flat: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Trainer:
    """The trainer of the model directory `path`, this rank's part of it; `tell` hears how it will compute.

    `flat` where no batch will share a prefix.
    """
    cuda, choice = ranks.device.type == "cuda", choose_trainer_dtype(config, ranks)
    policy = load_policy(
        path,
        find_loss(config.loss.id, config.loss.options),
        device=CPU if ranks.size > 1 else ranks.device,  # sharding moves layer by layer: a GPU never holds all of it
        checkpoint_activations=config.checkpoint_activations,
    )
    tell(FLAT if flat else describe_pack_layout(policy.model.config))
    tell(f"dtype: {choice}")
    if config.lora.enabled:
        add_adapters(policy.model, config.lora, seed)
        policy.to(ranks.device if ranks.size == 1 else CPU)
    if cuda if config.compile is None else config.compile:
        compile_layers(policy)
    if ranks.size == 1:
        return Trainer(policy, config, steps=steps, dtype=choice.dtype)
    shard(policy, ranks, choice.dtype)
    return Trainer(policy, config, steps=steps, gather=ranks.gather)


def choose_trainer_dtype(config: TrainerConfig, ranks: Ranks) -> DtypeChoice:
    """Choose the type of the computation and of the published weights: an engine then computes what was trained."""
    if config.dtype != "auto":
        return choose_dtype(config.dtype, None, ranks.device)
    if ranks.device.type == "cpu":
        return DtypeChoice(torch.float32, "the default on a CPU")
    return DtypeChoice(torch.bfloat16, "the default on a GPU")


def laying_of(trainer: Trainer) -> Laying:
    """How this trainer wants its packs."""
    cost = trainer.cost
    return Laying(
        layout=trainer.policy.layout,
        pack_tokens=trainer.config.pack_tokens,
        per_token=cost.token,
        per_pair=cost.pair * len(cost.windows),
    )
