"""Build a trainer from a model directory: load the model, add adapters, compile and shard it."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.model.experts import describe_experts
from ramify.model.images import ImageCache, load_image_family
from ramify.model.kernels.quantization import QuantizeMode
from ramify.model.lora import add_adapters, quantize_base
from ramify.model.pack_layout import PackLayout, describe_pack_layout
from ramify.model.precision import DtypeChoice, choose_dtype
from ramify.model.recurrent_layers import check_kernels
from ramify.model.tree_attention import describe_tree_attention
from ramify.processes.training_lock import RESERVED_MEMORY_VARIABLE
from ramify.run.store.image_store import ImageStore
from ramify.train.activation_limits import ActivationBudget, ActivationLimits, read_limits, write_limits
from ramify.train.batch import PackSpec
from ramify.train.checkpoint_manifest import SavedOptimizer, find_saved_optimizer
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks, apply_fsdp
from ramify.train.losses import load_loss
from ramify.train.memory import ModelSize, check_recompute_layers
from ramify.train.metrics import MetricSums
from ramify.train.model_inputs import LoadImage
from ramify.train.policy_model import PolicyModel, compile_layers, load_policy
from ramify.train.step_sizes import MOMENTS_KEY, plan_step
from ramify.train.token_stats import TokenStatsWriter
from ramify.train.trainer import Trainer
from ramify.train.trial import run_trial

CONTEXT_BYTES = 1 << 30  # of the GPU's memory for this process, outside torch's allocator
FLAT_DESCRIPTION = "flat: every branch is computed whole"


def build_trainer(
    model_path: Path,
    config: TrainerConfig,
    ranks: Ranks,
    *,
    quantize: QuantizeMode | None = None,
    total_steps: int | None = None,
    seed: int = 0,
    flat: bool = False,
    seq_len: int = 0,
    media: Path | None = None,
    checkpoints: Path | None = None,
    token_stats: TokenStatsWriter | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Trainer:
    """Build this rank's trainer of the model in `model_path`. On a GPU it runs a trial.

    `quantize` is the format of fixed weights beside adapters, if they are quantized; `total_steps` is the length of the
    run, for schedules that need it; `seed` initializes adapters. Set `flat` if no batch shares prefixes. `seq_len` is
    the length of the longest path, which a pack holds if `pack_tokens = "auto"`. `media` is the directory of the run's
    images, for batches that refer to them by hash; `checkpoints` is the directory of its checkpoints, whose format of
    moments `optim.moments = "auto"` continues, and of the limits that an earlier trainer had to lower. `token_stats`,
    if given, gets logprob and entropy of every trained token. `log` receives lines on layout, experts, dtype,
    operators, sizes and lowered limits.
    """
    is_cuda, choice = ranks.device.type == "cuda", choose_trainer_dtype(config, ranks)
    if is_cuda:
        reserve_gpu_memory(int(os.environ.get(RESERVED_MEMORY_VARIABLE, "0")))
    saved = find_saved_optimizer(checkpoints) if checkpoints is not None else None
    config = choose_step_sizes(
        model_path, config, ranks, saved_optimizer=saved, seq_len=seq_len, quantize=quantize, log=log
    )
    policy = _load_policy(model_path, config, ranks, choice.dtype, quantize)
    if is_cuda:
        check_kernels(policy.model, choice.dtype, ranks.device)
    log(FLAT_DESCRIPTION if flat else describe_pack_layout(policy.model.config))
    if experts := describe_experts(policy.model.config.to_dict()):
        log(experts)
    log(f"dtype: {choice}")
    uses_tree_attention = policy.layout is PackLayout.FOREST
    log(f"operators: {describe_tree_attention(ranks.device) if uses_tree_attention else 'from the model'}")
    if is_cuda or config.optim.moments != "float32":
        log(f"moments: {config.optim.moments}")
    if (lora := config.lora).enabled:
        add_adapters(policy.model, lora.rank, lora.alpha, lora.target_modules, seed)
        if quantize:
            log(f"fixed weights: {quantize.removesuffix('bit')} bits")
            quantize_base(policy.model, quantize, choice.dtype, ranks.device)
    if is_cuda if config.compile is None else config.compile:
        compile_layers(policy)
    if ranks.world_size > 1:
        apply_fsdp(policy, ranks, choice.dtype)
    trainer = Trainer(
        policy,
        config,
        total_steps=total_steps,
        dtype=choice.dtype if ranks.world_size == 1 else torch.float32,  # FSDP casts the weights itself
        device=ranks.device if ranks.world_size == 1 else None,  # FSDP has moved them
        merge_sums=lambda sums: MetricSums.merge(ranks.all_gather(sums)),
        num_ranks=ranks.world_size,
        load_image=build_image_loader(model_path, media) if policy.tower is not None else None,
        token_stats=token_stats,
        activations=_build_activation_budget(policy, config, ranks, checkpoints, log),
    )
    if is_cuda:
        run_trial(trainer)
    return trainer


def _load_policy(
    model_path: Path, config: TrainerConfig, ranks: Ranks, dtype: torch.dtype, quantize: QuantizeMode | None
) -> PolicyModel:
    """Load the model with its loss. Raises ConfigInvalid or ModelUnsupported if these ranks cannot train it."""
    if quantize and ranks.world_size > 1:
        raise ConfigInvalid("a quantized model is trained by one rank; remove the key", key="model.quantize")
    loss = load_loss(config.loss.id, config.loss.options)
    # Weights beside adapters have no master weights, so they are rounded at once. All move to the GPU one by one, or
    # layer by layer with FSDP, so that no GPU holds the model as it is stored.
    policy = load_policy(model_path, loss, device="cpu", dtype=dtype, keep_precision=not config.lora.enabled)
    if policy.tower is not None and ranks.world_size > 1:
        raise ModelUnsupported("a vision-language model is trained by one rank: its tower is not sharded")
    if config.freeze_vision:
        freeze_vision_tower(policy)
    return policy


def _build_activation_budget(
    policy: PolicyModel, config: TrainerConfig, ranks: Ranks, checkpoints: Path | None, log: Callable[[str], None]
) -> ActivationBudget:
    """Return the limits of the configuration, or those that an earlier trainer of the run has lowered."""
    planned = ActivationLimits.from_config(config)

    def record_lowered(former: ActivationLimits, lowered: ActivationLimits, reason: str) -> None:
        log(f"memory: {lowered} instead of {former} ({reason})")
        if checkpoints is not None:
            write_limits(checkpoints, planned, lowered)

    limits = ranks.broadcast(read_limits(checkpoints, planned)) if checkpoints is not None else planned
    if limits != planned:
        log(f"memory: {limits} instead of {planned}, as an earlier start of this run found; other settings undo it")
    return ActivationBudget(policy, planned, limits=limits, num_ranks=ranks.world_size, on_lowered=record_lowered)


def reserve_gpu_memory(num_bytes: int) -> None:
    """Leave these bytes of the current GPU to other processes: to torch, the GPU is full without them."""
    _, total = torch.cuda.mem_get_info()
    if num_bytes:
        torch.cuda.set_per_process_memory_fraction(max(0.0, 1 - (num_bytes + CONTEXT_BYTES) / total))


def freeze_vision_tower(policy: PolicyModel) -> None:
    """Exclude the vision tower from training. Raises ConfigInvalid if the model has none."""
    if policy.tower is None:
        raise ConfigInvalid("the model has no vision tower; remove the key", key="trainer.freeze_vision")
    for parameter in policy.tower.parameters():
        parameter.requires_grad_(False)


def build_image_loader(model_path: Path, media: Path | None) -> LoadImage:
    """Return a function that processes an image for a model; bytes that an entry lacks are read below `media`."""
    family = load_image_family(model_path)
    if family is None:
        raise ModelUnsupported(f"{model_path} has a vision tower, but its config names no image token")
    cache = ImageCache(family)
    store = ImageStore(media) if media is not None else None
    return lambda item: cache.process(store.read(item) if store is not None else item)


def choose_trainer_dtype(config: TrainerConfig, ranks: Ranks) -> DtypeChoice:
    """Choose the dtype of the computation and of published weights, so that engines compute with what was trained."""
    if config.dtype != "auto":
        return choose_dtype(config.dtype, None, ranks.device)
    if ranks.device.type == "cpu":
        return DtypeChoice(torch.float32, "the default on a CPU")
    return DtypeChoice(torch.bfloat16, "the default on a GPU")


def choose_step_sizes(
    model_path: Path,
    config: TrainerConfig,
    ranks: Ranks,
    *,
    saved_optimizer: SavedOptimizer | None = None,
    seq_len: int = 0,
    quantize: QuantizeMode | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> TrainerConfig:
    """Return the settings with a value for each size of a step; a plan of an RL run has chosen all of them.

    `saved_optimizer` is the optimizer of the run's checkpoints, whose format of moments it continues. Raises
    ConfigInvalid if the settings name another one, or if several ranks would have moments in 8 bits.
    """
    if saved_optimizer is not None:
        saved_optimizer.check_matches(config.optim)
        if config.optim.moments == "auto":
            config = config.with_moments(saved_optimizer.moments)
            log(f"{MOMENTS_KEY} = {saved_optimizer.moments}: as in the run's checkpoints")
    config.optim.check_ranks(ranks.world_size)
    model = ModelSize.from_name(str(model_path))
    if model is not None and not model.is_guessed:
        check_recompute_layers(config, model.num_layers)
    if model is not None and ranks.device.type == "cuda":
        memory = torch.cuda.mem_get_info(ranks.device)[0]
        planned, reasons = plan_step(
            config, model, seq_len=seq_len, num_ranks=ranks.world_size, memory=memory, quantize=quantize
        )
        config, reasons = ranks.broadcast((planned, reasons))  # GPUs may differ in their free memory
        for reason in reasons:
            log(reason)
    return config.with_moments("float32") if config.optim.moments == "auto" else config


def get_pack_spec(trainer: Trainer) -> PackSpec:
    """Return how this trainer wants its packs."""
    flops = trainer.flops_model
    return PackSpec(
        layout=trainer.policy.layout,
        pack_tokens=trainer.activations.limits.pack_tokens,
        flops_per_token=flops.per_token,
        flops_per_pair=flops.per_visible_pair * len(flops.layer_windows),
    )
