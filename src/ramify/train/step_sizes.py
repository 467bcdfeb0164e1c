"""The sizes of a training step to choose from, and the choice: the fastest that fit.

A step takes more or less memory by the tokens of a pack, the number of recomputed layers, and the format of AdamW's
moments. The plan of an RL run chooses them together with the sizes of its engines. A trainer without a plan, as of
`ramify sft`, chooses them here, by the same options, costs and rule. Needs no torch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.train.config import TrainerConfig
from ramify.train.memory import ModelSize, estimate_rank

PACK_SIZES = (49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024)
PACK_MULTIPLE = 128  # `pack_tokens` is a multiple of it
PACK_LOSS_TOKENS = 512  # lost per pack; at 7.1 B, four packs of 4k took at most 1.12 times as long as one of 16k
REPEATED_FRACTION = 0.25  # of `seq_len`, computed again in each pack: a prefix that the tree of another pack has too
RECOMPUTED_FRACTIONS = (0, 0.25, 0.5, 0.75, 1)  # of the layers
RECOMPUTE_COST = 1 / 3  # of a step, if all layers are recomputed: a forward pass more
ADAPTER_RECOMPUTE_COST = 1 / 2  # with adapters, whose backward pass has no weight gradients of the layers
MAX_MOMENTS_COST = 1.5  # 8-bit moments are chosen if the run is slower by more than this with float32
MOMENTS_KEY, PACKS_KEY, LAYERS_KEY = "trainer.optim.moments", "trainer.pack_tokens", "trainer.recompute_layers"
GIB = 1 << 30

Settings = dict[str, Any]  # values by dotted key


@dataclass(frozen=True, slots=True)
class SizeOption:
    """Settings that decide how much memory a run takes, and how slow it is with them, relative to the fastest."""

    settings: Settings
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """The sizes chosen for a run, and why AdamW's moments have their format."""

    option: SizeOption
    moments_reason: str


def list_moments(trainer: TrainerConfig, num_ranks: int) -> list[str | None]:
    """Return the formats of AdamW's moments to choose from on GPUs, preferred first; [None] if the format is fixed."""
    if trainer.optim.moments != "auto" or trainer.optim.type != "adamw":
        return [None]
    return ["float32", "8bit"] if num_ranks == 1 else ["float32"]


def list_step_options(
    trainer: TrainerConfig, model: ModelSize, seq_len: int, moments: str | None, *, max_pack: int = PACK_SIZES[0]
) -> list[SizeOption]:
    """Return the sizes of a step to choose from on GPUs. `max_pack` limits the packs that hold many paths.

    A pack holds `seq_len` tokens, because a path is never split. Packs of long paths may be larger than the others,
    because a pack with one path repeats the most.
    """
    packs = layers = list[int | None]([None])
    if trainer.pack_tokens == "auto":
        longest = round_up_pack(seq_len)
        packs = [longest, *(tokens for tokens in PACK_SIZES if longest < tokens <= max_pack)]
        packs = packs if longest >= PACK_SIZES[-1] else packs[1:]
        packs += [tokens for tokens in (round_up_pack(1.5 * seq_len), 2 * longest) if tokens > max_pack]
    if trainer.recompute_layers == "auto":
        layers = list(dict.fromkeys(round(fraction * model.num_layers) for fraction in RECOMPUTED_FRACTIONS))
    options: list[SizeOption] = []
    for num_tokens, num_layers in itertools.product(packs, layers):
        sizes = {MOMENTS_KEY: moments, PACKS_KEY: num_tokens, LAYERS_KEY: num_layers}
        cost = estimate_step_cost(trainer, model, seq_len, num_tokens=num_tokens, num_layers=num_layers)
        options.append(SizeOption({key: value for key, value in sizes.items() if value is not None}, cost))
    return options


def estimate_step_cost(
    trainer: TrainerConfig, model: ModelSize, seq_len: int, *, num_tokens: int | None, num_layers: int | None
) -> float:
    """Return the time of a step with these sizes, relative to one huge pack without recomputed layers.

    A size that is None does not count. In every pack, the tokens of a prefix that another pack has too do not advance
    the step.
    """
    cost = 1.0
    if num_tokens:
        num_new = num_tokens - REPEATED_FRACTION * min(seq_len, num_tokens)
        cost *= num_tokens / num_new * (1 + PACK_LOSS_TOKENS / num_tokens)
    if num_layers:
        recompute_cost = ADAPTER_RECOMPUTE_COST if trainer.lora.enabled else RECOMPUTE_COST
        cost *= 1 + recompute_cost * num_layers / model.num_layers
    return cost


def round_up_pack(num_tokens: float) -> int:
    """Return the smallest allowed size of a pack of this many tokens."""
    return math.ceil(num_tokens / PACK_MULTIPLE) * PACK_MULTIPLE


def choose_sizes(
    options_by_moments: Iterable[tuple[str | None, Sequence[SizeOption]]],
    fits: Callable[[Settings], bool],
    measure_need: Callable[[Settings], int],
) -> SizeChoice:
    """Return the fastest sizes that fit; if none fit, the smallest sizes. Options have the fastest first.

    Moments are float32, unless the run fits only with 8 bits, or is more than 1.5 times slower with float32.
    `measure_need` returns the bytes of a GPU that settings need.
    """
    chosen, smallest, reason = None, SizeOption({}), "it fits"
    for moments, options in options_by_moments:
        if chosen is not None and chosen.cost <= MAX_MOMENTS_COST * options[0].cost:
            break
        candidates = options if fits(options[-1].settings) else []
        option = next((option for option in candidates if fits(option.settings)), None)
        if option is None and chosen is None:
            smallest, needed = options[-1], measure_need(options[-1].settings)
            reason = f"{moments} does not fit, it needs at least {needed / GIB:.1f} GiB of a GPU"
        elif option is not None and (chosen is None or chosen.cost > MAX_MOMENTS_COST * option.cost):
            if chosen is not None:
                reason = f"float32 fits, but is about {chosen.cost / option.cost:.1f} times slower"
            chosen = option
    return SizeChoice(chosen or smallest, reason)


def explain_step_sizes(choice: SizeChoice, model: ModelSize | None) -> dict[str, str]:
    """Return why each size of a step has its value, by key."""
    return {
        MOMENTS_KEY: choice.moments_reason,
        PACKS_KEY: "the fastest that fits; at least seq_len, because a path is never split",
        LAYERS_KEY: f"of {model.num_layers if model is not None else 0} layers, as few as fit",
    }


def plan_step(
    trainer: TrainerConfig, model: ModelSize, *, seq_len: int, num_ranks: int, memory: int, quantize: str | None = None
) -> tuple[TrainerConfig, list[str]]:
    """Return the settings of a trainer alone on GPUs with `memory` bytes, with a value for each size, and the reasons.

    If nothing fits, the sizes are the smallest.
    """

    def measure_need(settings: Settings) -> int:
        sized = with_step_sizes(trainer, settings)
        return estimate_rank(sized, model, gpu=True, num_ranks=num_ranks, quantize=quantize).with_headroom

    options = (
        (
            moments,
            sorted(list_step_options(trainer, model, seq_len, moments), key=lambda option: option.cost),
        )
        for moments in list_moments(trainer, num_ranks)
    )
    choice = choose_sizes(options, lambda settings: measure_need(settings) <= memory, measure_need)
    settings, reasons = choice.option.settings, explain_step_sizes(choice, model)
    return with_step_sizes(trainer, settings), [f"{key} = {value}: {reasons[key]}" for key, value in settings.items()]


def with_step_sizes(trainer: TrainerConfig, settings: Settings) -> TrainerConfig:
    """Return a trainer's settings with these sizes of a step."""
    if MOMENTS_KEY in settings:
        trainer = trainer.with_moments(settings[MOMENTS_KEY])
    names = {"pack_tokens": PACKS_KEY, "recompute_layers": LAYERS_KEY}
    return trainer.model_copy(update={name: settings[key] for name, key in names.items() if key in settings})
