"""A training step on one GPU: MFU, time per part, forest over flat, recompilations.

The model is random and has the shape of Qwen3-0.6B, or with `--shape` of Qwen3.5-0.8B or Qwen3-4B, whose moments have
8 bits, and which takes no steps of 64k tokens, for lack of memory. It computes in bfloat16 on float32 master weights,
and a step includes clipping and AdamW. MFU counts each matrix product once, attention over visible pairs only, no
recomputation and no padding, against 989 TFLOP/s; the formula is printed. 16k tokens are 16 sequences of 1,024, 64k are
4 of 16,384.
A step is timed by itself, from a batch at hand to new weights on a chip that has rested, which is how steps of RL come;
and one after the other without a rest, as in SFT, where the chip reaches its power limit and lowers its clock.
Forest over flat runs the same rollouts both ways in packs of 16k tokens: groups of 16 attempts of 1,024 tokens, and
agents with a long main line and forks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from _check import NO_COMPETITOR, Row, finish, parser
from _gpu import GROUP_SIZE, PACK_TOKENS, PATH_TOKENS, TraceMaker, make_trainer
from torch._dynamo.utils import counters
from transformers import Qwen3_5TextConfig, Qwen3Config

from ramify.model.device_copy import DEVICE_PEAKS
from ramify.trace import AnnotatedTrace, Forest, Message, Trace, build_forest
from ramify.train import Batch, Trainer, pack_forests
from ramify.train.metrics import FLOPS_FORMULA, StepMetrics
from ramify.train.trainer import PendingStep

RATIOS = (1, 2, 4, 8, 12)
TURN_TOKENS, FORK_TOKENS = 256, 128  # of a turn on an agent's main line, and of a branch off it
TREES_PER_PACK: dict[float, int] = {1: 4, 2: 4, 4: 4, 8: 2, 12: 1}  # ratio: trees in a pack
# MFU of the cases in percent, and the share of the FLOP ratio by which forests are faster than flat paths.
TARGETS: dict[str, tuple[Sequence[float | None], float | None]] = {
    "qwen3-0.6b": ((48.0, 46.0, 40.0), 0.9),
    "qwen3-4b": ((54.0, None), None),
    "qwen3.5-0.8b": ((35.0, None, None), 0.88),
}
OPTIMIZERS = {"qwen3-4b": {"lr": 1e-6, "moments": "8bit"}}  # of shapes that do not fit with moments in float32
IDLE_SECONDS = 0.15  # seconds before a step that is timed by itself
SHAPES = {
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen3-4b": Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(  # three layers of four are gated delta nets
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
    ),
    "small": Qwen3Config(  # to try the script itself
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}


# -- rollouts ------------------------------------------------------------------------------------------------------


class Rollouts(TraceMaker):
    """Groups and agents of a given ratio of tokens, flat over forest."""

    def group(self, ratio: float) -> list[AnnotatedTrace]:
        """Build attempts at one prompt with about `ratio` times the tokens of their forest; groups fill packs."""
        if ratio == 1:
            return [self.chain(self.ids(PATH_TOKENS // 2), PATH_TOKENS // 2)]
        size = PACK_TOKENS // round(PACK_TOKENS * ratio / (GROUP_SIZE * PATH_TOKENS))
        reply = (size - PATH_TOKENS) // (GROUP_SIZE - 1)
        prompt = self.ids(PATH_TOKENS - reply)
        return [self.chain(prompt, reply) for _ in range(GROUP_SIZE)]

    def agent(self, ratio: float) -> list[AnnotatedTrace]:
        """Build a main line of turns with evenly spaced branches; the trees fill packs exactly."""
        size = PACK_TOKENS // TREES_PER_PACK[ratio]
        line = TURN_TOKENS * round((size + (size**2 - 8 * FORK_TOKENS * (ratio - 1) * size) ** 0.5) / 2 / TURN_TOKENS)
        trace = Trace(id=f"t{next(self.names)}")
        turns: list[int] = []
        last = -1
        for _ in range(line // TURN_TOKENS):
            trace.graph.add_node(last, Message("user"), self.ids(TURN_TOKENS * 3 // 4))
            last = self.reply(trace, len(trace.nodes) - 1, TURN_TOKENS // 4)
            turns.append(last)
        forks = (size - line) // FORK_TOKENS
        for fork in range(forks):
            parent = turns[round((fork + 0.5) / forks * (len(turns) - 1))]
            trace.graph.add_node(parent, Message("tool"), self.ids(FORK_TOKENS // 2))
            self.reply(trace, len(trace.nodes) - 1, FORK_TOKENS // 2)
        return [self.annotate(trace)]


def pack_both_ways(groups: Sequence[list[AnnotatedTrace]]) -> tuple[list[Forest], list[Forest]]:
    """Pack the rollouts as forests and as flat paths."""
    forests = pack_forests([build_forest(group) for group in groups], PACK_TOKENS)
    return forests, pack_forests([build_forest([trace]) for group in groups for trace in group], PACK_TOKENS, flat=True)


def fill_packs(make: Any, ratio: float, packs: int) -> list[list[AnnotatedTrace]]:
    """Build as many groups as fit into `packs` packs as forests."""
    groups: list[list[AnnotatedTrace]] = []
    size = 0
    while True:
        group = make(ratio)
        size += len(build_forest(group))
        if size > packs * PACK_TOKENS and groups:
            return groups
        groups.append(group)


# -- measuring -----------------------------------------------------------------------------------------------------


def count_compilations() -> int:
    return counters["frames"]["ok"]


def measure(trainer: Trainer, batches: Iterator[list[Forest]], steps: int) -> tuple[StepMetrics, StepMetrics, int]:
    """Return the median step by itself and in a row, and the number of compilations after the first three steps.

    In a row, each step is started while the one before is computed. Every step has new data.
    """
    for _ in range(3):
        trainer.step(Batch.from_packs(0, next(batches)))
    before = count_compilations()
    torch.cuda.reset_peak_memory_stats()
    alone: list[StepMetrics] = []
    for _ in range(steps):
        batch = Batch.from_packs(0, next(batches))
        time.sleep(IDLE_SECONDS)
        alone.append(trainer.step(batch))
    pending: list[PendingStep] = []
    for _ in range(steps):
        pending.append(trainer.start_step(Batch.from_packs(0, next(batches))))
        if len(pending) > 1:
            pending[-2].wait_for_metrics()
    return (
        _median_step(alone),
        _median_step([step.wait_for_metrics() for step in pending]),
        count_compilations() - before,
    )


def _median_step(steps: list[StepMetrics]) -> StepMetrics:
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def measure_parts(trainer: Trainer, packs: list[Forest]) -> dict[str, float]:
    """Return the milliseconds of each part of one step, measured by events on the device."""
    marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    def before_layers(*_: Any) -> None:
        mark("rows")

    def after_layers(module: Any, args: Any, output: Any) -> None:
        mark("layers")
        output.last_hidden_state.register_hook(lambda grad: mark("head backward"))

    decoder = trainer.policy.model.get_decoder()
    hooks = [decoder.register_forward_pre_hook(before_layers), decoder.register_forward_hook(after_layers)]
    torch.cuda.synchronize()
    mark("start")
    trainer.master_weights.zero_grad(num_packs=len(packs))
    batch = Batch.from_packs(0, packs)
    for pack in packs:
        output = trainer.policy(trainer.prepare_inputs(pack), batch.entry_counts)
        mark("head and loss")
        output.loss.backward()
        mark("layers backward")
    trainer.optimizer_step(0)
    mark("clip and optimizer")
    torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    milliseconds: dict[str, float] = {}
    for (_, before), (name, after) in itertools.pairwise(marks):
        milliseconds[name] = milliseconds.get(name, 0.0) + before.elapsed_time(after)
    return milliseconds


def print_step(title: str, trainer: Trainer, packs: list[Forest], alone: StepMetrics, row: StepMetrics) -> None:
    memory = torch.cuda.max_memory_allocated() / 2**30
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in measure_parts(trainer, packs).items())
    speeds = [f"{1e3 * step.seconds:.1f} ms, {step.tokens_per_second / 1e3:.1f}k tok/s" for step in (alone, row)]
    limits = f"{memory:.1f} GiB, {trainer.activations.limits.recompute_layers} recomputed layers"
    print(f"{title}: by itself {speeds[0]}, in a row {speeds[1]}; {limits}; ms: {parts}", flush=True)


# -- comparisons ---------------------------------------------------------------------------------------------------


def utilisation(trainer: Trainer, maker: TraceMaker, targets: Sequence[float | None]) -> tuple[list[Row], int]:
    """Measure the first `len(targets)` cases."""
    cases = [
        ("16k tokens, all trained", 16, PATH_TOKENS, PATH_TOKENS - 1, 10),
        ("16k tokens, an eighth trained", 16, PATH_TOKENS, PATH_TOKENS // 8, 10),
        ("64k tokens, all trained", 4, 16 * PATH_TOKENS, 16 * PATH_TOKENS - 1, 4),
    ]
    rows: list[Row] = []
    compiled = 0
    for (name, count, length, trained, steps), target in zip(cases, targets):

        def batches(count: int = count, length: int = length, trained: int = trained) -> Iterator[list[Forest]]:
            while True:
                yield pack_forests(
                    [build_forest(group) for group in maker.chains(count, length, trained)], count * length
                )

        alone, in_a_row, recompiled = measure(trainer, batches(), steps)
        compiled += recompiled
        print_step(name, trainer, next(batches()), alone, in_a_row)
        rows.append(Row(f"MFU, {name}", 100 * (alone.mfu or 0.0), None, "%", target, at_least=True))
        rows.append(Row(f"MFU, {name}, steps in a row", 100 * (in_a_row.mfu or 0.0), None, "%", None))
    return rows, compiled


def speed_up(
    trainer: Trainer, maker: Rollouts, packs: int, ratios: Sequence[int], target: float | None
) -> tuple[list[Row], int]:
    rows: list[Row] = []
    compiled = 0
    for name, make in (("groups of 16", maker.group), ("agents with forks", maker.agent)):
        for ratio in ratios:
            forests, flat = pack_both_ways(fill_packs(make, ratio, packs))
            seconds: list[float] = []
            for packed in (forests, flat):
                trainer.step(Batch.from_packs(0, packed))  # compiles every length
                before = count_compilations()
                seconds.append(statistics.mean(trainer.step(Batch.from_packs(0, packed)).seconds for _ in range(2)))
                compiled += count_compilations() - before
            flops = sum(map(trainer.flops_model.count_flops, flat)) / sum(map(trainer.flops_model.count_flops, forests))
            tokens = sum(pack.num_tokens for pack in flat) / sum(pack.num_tokens for pack in forests)
            label = f"{name}, forest over flat: {tokens:.2f} x tokens, {flops:.2f} x FLOPs"
            rows.append(Row(label, seconds[1] / seconds[0], flops, "x", target and target * flops, at_least=True))
            full = " and ".join(f"{len(packed)} packs {_fill(packed):.0%} full" for packed in (forests, flat))
            print(f"{label}: {seconds[1] / seconds[0]:.2f} x faster, {full}", flush=True)
    return rows, compiled


def _fill(packs: list[Forest]) -> float:
    return sum(pack.num_tokens for pack in packs) / (PACK_TOKENS * len(packs))


def speed(trainer: Trainer, maker: Rollouts, args: Any) -> list[Row]:
    """Measure MFU, forest over flat, and the compilations after the third step."""
    rows: list[Row] = []
    compiled = 0
    mfu_targets, forest_target = TARGETS.get(args.shape, ((None,) * 3, None))
    if args.only != "forest":
        new_rows, recompiled = utilisation(trainer, maker, mfu_targets)
        rows, compiled = rows + new_rows, compiled + recompiled
    if args.only != "mfu":
        new_rows, recompiled = speed_up(trainer, maker, args.packs, args.ratios, forest_target)
        rows, compiled = rows + new_rows, compiled + recompiled
    return [*rows, Row("compilations after the third step", float(compiled), None, "", 0.0)]


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="shape of the model")
    flags.add_argument("--packs", type=int, default=4, help="packs of 16k tokens the forests of a comparison fill")
    flags.add_argument("--ratios", type=int, nargs="+", choices=RATIOS, default=RATIOS, help="token ratios compared")
    flags.add_argument("--only", choices=["mfu", "forest"], help="run one of the comparisons")
    args: Any = flags.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return NO_COMPETITOR
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {args.shape}\nFLOPs = {FLOPS_FORMULA}")
    print(f"MFU against {DEVICE_PEAKS['H200'].flops / 1e12:.0f} TFLOP/s", flush=True)
    shape = SHAPES[args.shape]
    trainer = make_trainer(shape, 4 * PACK_TOKENS, OPTIMIZERS.get(args.shape, {"lr": 1e-6}))
    rows = speed(trainer, Rollouts(shape.vocab_size), args)
    return finish(f"benchmarks/trainer_gpu.py: a training step on {name}", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
