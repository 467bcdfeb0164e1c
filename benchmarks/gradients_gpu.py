"""Gradients in bfloat16 on one GPU: forests beside flat paths, and both beside float32.

The gradients of a forest should differ from flat paths no more than two flat runs with different packing
differ from each other, and be as close to float32. The models are trained first: eight architectures of realistic
depth, trained here on the sources of Python's standard library, and SmolLM2 if it is given; the text is new to them.

A batch is packed flat in several ways and as forests in as many. The check compares the mean distance of forests to
flat runs with the largest distance between two flat runs; compared with the mean distance of flat runs the ratio is 1
within its error, so that is only printed, and so is the distance between forests. The distance of forests to float32
may be 3 % larger than for flat runs.

With Qwen3, an allocation is also made to fail: the step is repeated with recomputed layers or smaller packs, and may be
as far from flat runs as these are from each other.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _check import NO_COMPETITOR, Row, finish, parser, show
from _gpu import GROUP_SIZE, PACK_TOKENS, PATH_TOKENS, TraceMaker, make_trainer
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from ramify.model.resolve import resolve_model_path
from ramify.trace import AnnotatedTrace, Annotation, Forest, Message, Trace, build_forest
from ramify.train import Batch, Trainer, pack_forests
from ramify.train.trainer import PendingStep

BATCHES = 8
PACK_COUNTS = (1, 2, 3, 4)  # approximate numbers of packs of a batch
KINDS = ("groups", "trees")
TRAIN_STEPS = 400
TRAIN_CHARS = 5_000_000
FAILING_MODEL = "qwen3"
FAILING_SHARE = 0.25  # of the memory that a step needs, when an allocation shall fail
SIZES: dict[str, Any] = {
    "vocab_size": 288,  # of the byte tokenizer of `tiny`
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "sliding windows": MistralConfig(**SIZES, sliding_window=256),
    "sinks": GptOssConfig(
        **(SIZES | {"intermediate_size": 576}), sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    ),
    "soft caps": Gemma2Config(**SIZES, sliding_window=256, query_pre_attn_scalar=64, attn_logit_softcapping=5.0),
    "delta nets": Qwen3_5TextConfig(**SIZES, **DELTA_NET),
    "mamba-2": GraniteMoeHybridConfig(
        **SIZES,
        shared_intermediate_size=1536,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["mamba", "mamba", "attention"] * 8,
        mamba_n_heads=18,
        mamba_d_head=64,
        mamba_d_state=128,
        attention_multiplier=0.125,
    ),
    "convolutions": Lfm2Config(
        **SIZES, block_auto_adjust_ff_dim=False, layer_types=["conv", "conv", "full_attention"] * 8
    ),
}


# -- rollouts ------------------------------------------------------------------------------------------------------


class TextTraceMaker(TraceMaker):
    """Builds traces of text, trained by cross entropy.

    With `learning` the weights are 1; otherwise they have either sign, like the gradient of RL on the sampling policy.
    """

    def __init__(self, model: Path, text: str, learning: bool = False) -> None:
        super().__init__(0)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.text, self.learning = np.array(tokenizer(text, verbose=False)["input_ids"], np.int32), learning

    def ids(self, size: int) -> np.ndarray:
        start = self.rng.integers(0, len(self.text) - size)
        return self.text[start : start + size]

    def annotate(self, trace: Trace) -> AnnotatedTrace:
        annotations = super().annotate(trace).annotations
        weights = [1.0 if self.learning else annotation.advantage for annotation in annotations]
        return AnnotatedTrace(
            trace, tuple(Annotation(old.trace_id, old.node, ce=ce) for old, ce in zip(annotations, weights))
        )

    def uneven_group(self) -> list[AnnotatedTrace]:
        """Build attempts of random lengths at a prompt of random length."""
        prompt = self.ids(int(self.rng.integers(600, 900)))
        return [self.chain(prompt, int(self.rng.integers(90, 330))) for _ in range(GROUP_SIZE)]

    def random_tree(self) -> list[AnnotatedTrace]:
        """Build an agent with one or two roots, turns of random lengths, and forks at random turns."""
        trace = Trace(id=f"t{next(self.names)}")
        turns: list[int] = []
        for _ in range(self.rng.integers(1, 3)):
            last = -1
            for _ in range(self.rng.integers(3, 9)):
                trace.graph.add_node(last, Message("user"), self.ids(int(self.rng.integers(40, 260))))
                last = self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(20, 120)))
                turns.append(last)
        for _ in range(self.rng.integers(2, 10)):
            trace.graph.add_node(
                int(self.rng.choice(turns)), Message("tool"), self.ids(int(self.rng.integers(30, 120)))
            )
            self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(30, 120)))
        return [self.annotate(trace)]


def read_stdlib() -> str:
    """Return sources of the standard library."""
    home = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(home.rglob("*.py")) if "-packages" not in str(path)]
    return "\n".join(path.read_text(errors="replace") for path in paths)[:TRAIN_CHARS]


def read_docs() -> str:
    home = Path(__file__).parents[1] / "docs"
    paths = sorted(set(home.glob("*.md")) - {home / "benchmarks.md"})  # which holds the results of this script
    return "\n".join(path.read_text() for path in paths)


# -- models --------------------------------------------------------------------------------------------------------


def train(name: str, trainer: Trainer, maker: TraceMaker, steps: int) -> None:
    """Train for `steps` steps of 16k tokens."""
    losses: list[float] = []
    previous: PendingStep | None = None
    for step in range(steps):
        chains = maker.chains(PACK_TOKENS // PATH_TOKENS, PATH_TOKENS, PATH_TOKENS - 1)
        current = trainer.start_step(
            Batch.from_packs(step, pack_forests([build_forest(group) for group in chains], PACK_TOKENS))
        )
        if previous:
            losses.append(previous.wait_for_metrics().loss)
        previous = current
    if previous:
        losses.append(previous.wait_for_metrics().loss)
    curve = " ".join(f"{loss:.2f}" for loss in losses[:: max(1, steps // 6)])
    print(f"{name}, {steps} training steps, loss {curve}", flush=True)


def make_float32_copy(trainer: Trainer, model: Any) -> Trainer:
    """Return a trainer that computes with the same, rounded weights in float32."""
    exact = make_trainer(model, PACK_TOKENS, {}, torch.float32)
    with torch.no_grad():
        for exact_param, param in zip(exact.policy.parameters(), trainer.policy.parameters()):
            exact_param.copy_(param)
    return exact


# -- measuring -----------------------------------------------------------------------------------------------------


def compute_gradient(trainer: Trainer, packs: list[Forest]) -> torch.Tensor:
    trainer.forward_backward(Batch.from_packs(0, packs))
    gradients = trainer.master_weights.gradients()
    return torch.cat([gradients[item].float().flatten() for item in trainer.policy.parameters() if item in gradients])


def relative_distances(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return the distances relative to the norm."""
    return [float((left - right).norm() / right.norm()) for left, right in pairs]


@dataclass(frozen=True)
class Distances:
    """Distances between the gradients of one batch in several packings."""

    forest_to_flat: list[float]
    flat_to_flat: list[float]
    forest_to_forest: list[float]
    forest_to_exact: list[float]
    flat_to_exact: list[float]
    exact_forest_to_exact: list[float]  # both in float32


def measure_distances(
    trainer: Trainer, exact: Trainer, maker: TraceMaker, groups: list[list[AnnotatedTrace]]
) -> Distances:
    """Measure the distances of one batch.

    Forests and flat paths are packed into about the same number of packs, because the gradient of a pack is rounded to
    bfloat16 before several packs are summed.
    """

    def compute_gradients(forests: list[Forest], flat: bool) -> list[torch.Tensor]:
        size = sum(map(len, pack_forests(forests, PACK_TOKENS, flat=flat)))
        shuffled = [[forests[index] for index in maker.rng.permutation(len(forests))] for _ in PACK_COUNTS]
        return [
            compute_gradient(trainer, pack_forests(order, size // count + PATH_TOKENS, flat=flat))
            for order, count in zip(shuffled, PACK_COUNTS)
        ]

    trees, paths = (
        [build_forest(group) for group in groups],
        [build_forest([trace]) for group in groups for trace in group],
    )
    forests, flat = compute_gradients(trees, flat=False), compute_gradients(paths, flat=True)
    exact_gradient = [compute_gradient(exact, pack_forests(paths, PACK_TOKENS, flat=True))]
    exact_forest = [compute_gradient(exact, pack_forests(trees, PACK_TOKENS))]
    return Distances(
        forest_to_flat=relative_distances(itertools.product(forests, flat)),
        flat_to_flat=relative_distances(itertools.combinations(flat, 2)),
        forest_to_forest=relative_distances(itertools.combinations(forests, 2)),
        forest_to_exact=relative_distances(itertools.product(forests, exact_gradient)),
        flat_to_exact=relative_distances(itertools.product(flat, exact_gradient)),
        exact_forest_to_exact=relative_distances(zip(exact_forest, exact_gradient)),
    )


def compare_after_failed_allocation(name: str, trainer: Trainer, maker: TextTraceMaker) -> Row:
    """Compare a step that ran out of memory, and was repeated with less, with flat runs. Its limits stay lowered."""
    groups = [maker.uneven_group() for _ in range(2)]
    forests, paths = ([build_forest(group) for group in groups], [build_forest([t]) for group in groups for t in group])
    size, planned = sum(map(len, paths)), trainer.activations.limits
    flat = [compute_gradient(trainer, pack_forests(paths, size // n + PATH_TOKENS, flat=True)) for n in PACK_COUNTS]
    packs = pack_forests(forests, PACK_TOKENS)
    trainer.free_memory()
    kept = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    compute_gradient(trainer, packs)
    needed = torch.cuda.max_memory_reserved() - kept
    trainer.free_memory()
    torch.cuda.set_per_process_memory_fraction((kept + FAILING_SHARE * needed) / torch.cuda.mem_get_info()[1])
    failed = compute_gradient(trainer, packs)
    torch.cuda.set_per_process_memory_fraction(1.0)
    if trainer.activations.limits == planned:
        raise SystemExit("no allocation failed: the limit was too high")
    print(f"{name}, after a failed allocation: {trainer.activations.limits} instead of {planned}", flush=True)
    distance = statistics.mean(relative_distances(itertools.product([failed], flat)))
    ratio = distance / max(relative_distances(itertools.combinations(flat, 2)))
    return Row(f"{name}, after a failed allocation: to flat over the furthest flat to flat", ratio, None, "x", 1.0)


def compare(name: str, trainer: Trainer, model: Any, maker: TextTraceMaker, kinds: Sequence[str] = KINDS) -> list[Row]:
    """Compare groups, and trees with forks and several roots, which small packs split.

    Lengths are uneven, as in real rollouts: paths of whole blocks would be rounded alike in all packings.
    """
    rows: list[Row] = []
    mean = statistics.mean
    exact = make_float32_copy(trainer, model) if kinds else trainer
    for kind in kinds:
        make, count = (maker.uneven_group, 2) if kind == "groups" else (maker.random_tree, 6)
        batches = [measure_distances(trainer, exact, maker, [make() for _ in range(count)]) for _ in range(BATCHES)]
        flat = mean(mean(batch.flat_to_flat) for batch in batches)
        exact_distance = mean(mean(batch.flat_to_exact) for batch in batches)
        exact_forest = max(max(batch.exact_forest_to_exact) for batch in batches)
        print(
            f"{name}, {kind}: of the norm, flat to flat {flat:.5f}, flat to float32 {exact_distance:.5f}, "
            f"forest to flat in float32 {exact_forest:.1e} at most",
            flush=True,
        )
        comparisons = [
            (
                "flat over the furthest flat to flat",
                1.0,
                [mean(batch.forest_to_flat) / max(batch.flat_to_flat) for batch in batches],
            ),
            (
                "flat over flat to flat",
                None,
                [mean(batch.forest_to_flat) / mean(batch.flat_to_flat) for batch in batches],
            ),
            (
                "forest over flat to flat",
                None,
                [mean(batch.forest_to_forest) / mean(batch.flat_to_flat) for batch in batches],
            ),
            (
                "float32 over flat to float32",
                1.03,
                [mean(batch.forest_to_exact) / mean(batch.flat_to_exact) for batch in batches],
            ),
        ]
        for label, target, ratios in comparisons:
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            rows.append(Row(f"{name}, {kind}: forest to {label}, ± {error:.3f}", mean(ratios), None, "x", target))
            by_batch = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{rows[-1].name}: {rows[-1].ours:.3f}, by batch {by_batch}", flush=True)
    return rows


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__, shown_flags=["--smollm2"])
    flags.add_argument(
        "--lessons", type=int, default=TRAIN_STEPS, help="training steps of a model before it is measured"
    )
    flags.add_argument("--only", choices=list(MODELS), help="measure one of the models trained here")
    flags.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="rollouts that are compared")
    args: Any = flags.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return NO_COMPETITOR
    device = torch.cuda.get_device_name()
    rows: list[Row] = []
    tiny, text = resolve_model_path("tiny"), read_docs()
    maker = TextTraceMaker(tiny, read_stdlib(), learning=True)
    for name in [args.only] if args.only else MODELS:
        trainer = make_trainer(MODELS[name], PACK_TOKENS, {"lr": 1e-3, "schedule": {"warmup_steps": 30}})
        train(name, trainer, maker, args.lessons)
        rows += compare(name, trainer, MODELS[name], TextTraceMaker(tiny, text), args.kinds)
        if name == FAILING_MODEL:
            rows += show(compare_after_failed_allocation(name, trainer, TextTraceMaker(tiny, text)))
    if args.smollm2:
        trainer = make_trainer(args.smollm2, PACK_TOKENS, {})
        rows += compare("SmolLM2", trainer, args.smollm2, TextTraceMaker(args.smollm2, text), args.kinds)
    return finish(f"benchmarks/gradients_gpu.py: gradients in bfloat16 on {device}", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
