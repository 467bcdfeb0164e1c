"""Gradients in bfloat16 on one GPU: forests beside flat paths, and both beside float32.

They should differ no more between a forest and flat paths than two flat runs that are packed differently do, and be as
near to what float32 gives. That is asked of models that have learned: three shapes of real depth, taught here on the
sources of Python's standard library, and SmolLM2 where it is given; on text they have not seen.

A batch is laid out flat in several ways and as forests in as many. What is checked is how far forests are from flat
runs on average, over the two flat runs that are furthest apart: over the average of flat runs the answer is 1 within
its error, so that is only shown. Beside float32 forests may be 3 % further off.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _check import NO_COMPETITOR, Row, finish, parser
from _gpu import GROUP, PACK, PATH, Maker, trainer_of
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, Qwen3Config

from ramify.model.resolve import resolve_model_path
from ramify.trace import AnnotatedTrace, Annotation, Forest, Message, Trace, build_forest
from ramify.train import Batch, Trainer, pack_forests
from ramify.train.trainer import PendingStep

BATCHES = 8
PARTS = (1, 2, 3, 4)  # about as many packs a batch is laid out in
LESSONS = 400
LESSON = 5_000_000  # characters to learn from
LEARNER: dict[str, Any] = {
    "vocab_size": 288,  # of the bytes `tiny` reads
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LEARNERS = {
    "llama": LlamaConfig(**LEARNER),
    "qwen3": Qwen3Config(**LEARNER),
    "sliding windows": MistralConfig(**LEARNER, sliding_window=256),
}


# -- rollouts ------------------------------------------------------------------------------------------------------


class Reader(Maker):
    """Traces of text, trained by cross entropy: with weights of either sign, what RL is on the policy that sampled, or
    to learn it."""

    def __init__(self, model: Path, text: str, learning: bool = False) -> None:
        super().__init__(0)
        words: Any = AutoTokenizer.from_pretrained(model)(text, verbose=False)
        self.text, self.learning = np.array(words["input_ids"], np.int32), learning

    def ids(self, size: int) -> np.ndarray:
        start = self.rng.integers(0, len(self.text) - size)
        return self.text[start : start + size]

    def sample(self, trace: Trace) -> AnnotatedTrace:
        notes = super().sample(trace).annotations
        weights = [1.0 if self.learning else note.advantage for note in notes]
        return AnnotatedTrace(
            trace, tuple(Annotation(note.trace_id, note.node, ce=ce) for note, ce in zip(notes, weights))
        )

    def uneven(self) -> list[AnnotatedTrace]:
        """Attempts of any length at a prompt of any length."""
        prompt = self.ids(int(self.rng.integers(600, 900)))
        return [self.chain(prompt, int(self.rng.integers(90, 330))) for _ in range(GROUP)]

    def wanderer(self) -> list[AnnotatedTrace]:
        """An agent that begins once or twice, takes turns of any length, and forks anywhere."""
        trace = Trace(id=f"t{next(self.names)}")
        turns: list[int] = []
        for _ in range(self.rng.integers(1, 3)):
            last = -1
            for _ in range(self.rng.integers(3, 9)):
                trace.add_node(last, Message("user"), self.ids(int(self.rng.integers(40, 260))))
                last = self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(20, 120)))
                turns.append(last)
        for _ in range(self.rng.integers(2, 10)):
            trace.add_node(int(self.rng.choice(turns)), Message("tool"), self.ids(int(self.rng.integers(30, 120))))
            self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(30, 120)))
        return [self.sample(trace)]


def lesson() -> str:
    """Sources of the standard library."""
    home = Path(sysconfig.get_paths()["stdlib"])
    own = [each for each in sorted(home.rglob("*.py")) if "-packages" not in str(each)]
    return "\n".join(each.read_text(errors="replace") for each in own)[:LESSON]


def docs() -> str:
    home = Path(__file__).parents[1] / "docs"
    names = sorted(set(home.glob("*.md")) - {home / "benchmarks.md"})  # which tells of what is found here
    return "\n".join(each.read_text() for each in names)


# -- models --------------------------------------------------------------------------------------------------------


def teach(name: str, trainer: Trainer, teacher: Maker, steps: int) -> None:
    """So many steps of 16k tokens."""
    losses: list[float] = []
    running: PendingStep | None = None
    for step in range(steps):
        chains = teacher.chains(PACK // PATH, PATH, PATH - 1)
        begun = trainer.start_step(Batch.from_packs(step, pack_forests([build_forest(each) for each in chains], PACK)))
        if running:
            losses.append(running.wait_for_metrics().loss)
        running = begun
    if running:
        losses.append(running.wait_for_metrics().loss)
    told = " ".join(f"{each:.2f}" for each in losses[:: max(1, steps // 6)])
    print(f"{name}, {steps} steps of learning, loss {told}", flush=True)


def exactly(trainer: Trainer, model: Any) -> Trainer:
    """The same weights, which bfloat16 has rounded, computed with in float32."""
    exact = trainer_of(model, PACK, {}, torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(exact.policy.parameters(), trainer.policy.parameters()):
            ours.copy_(theirs)
    return exact


# -- measuring -----------------------------------------------------------------------------------------------------


def gradients(trainer: Trainer, packs: list[Forest]) -> torch.Tensor:
    trainer.forward_backward(Batch.from_packs(0, packs))
    trainer.master_weights.upcast_gradients()
    return torch.cat(
        [master.grad.flatten() for master in trainer.master_weights.parameters() if master.grad is not None]
    )


def apart(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """As shares of the norm."""
    return [float((left - right).norm() / right.norm()) for left, right in pairs]


@dataclass(frozen=True)
class Distances:
    """Between the gradients of one batch, over its packings."""

    forest_to_flat: list[float]
    flat_to_flat: list[float]
    forest_to_exact: list[float]
    flat_to_exact: list[float]


def distances(trainer: Trainer, exact: Trainer, maker: Maker, groups: list[list[AnnotatedTrace]]) -> Distances:
    """Forests and flat paths are laid out in about as many packs, as a pack's gradients are rounded to bfloat16 before
    those of several are added up."""

    def runs(forests: list[Forest], flat: bool) -> list[torch.Tensor]:
        size = sum(map(len, pack_forests(forests, PACK, flat=flat)))
        mixed = [[forests[number] for number in maker.rng.permutation(len(forests))] for _ in PARTS]
        return [
            gradients(trainer, pack_forests(each, size // parts + PATH, flat=flat)) for each, parts in zip(mixed, PARTS)
        ]

    trees, paths = (
        [build_forest(group) for group in groups],
        [build_forest([each]) for group in groups for each in group],
    )
    forests, flat = runs(trees, flat=False), runs(paths, flat=True)
    truth = [gradients(exact, pack_forests(paths, PACK, flat=True))]
    return Distances(
        forest_to_flat=apart(itertools.product(forests, flat)),
        flat_to_flat=apart(itertools.combinations(flat, 2)),
        forest_to_exact=apart(itertools.product(forests, truth)),
        flat_to_exact=apart(itertools.product(flat, truth)),
    )


def agreement(name: str, trainer: Trainer, exact: Trainer, maker: Reader) -> list[Row]:
    """Of groups, and of trees with forks and several roots, which are cut in small packs. Lengths are those of real
    rollouts, uneven: paths of whole blocks would be rounded alike in all packings."""
    rows: list[Row] = []
    mean = statistics.mean
    for kind, make, count in (("groups", maker.uneven, 2), ("trees", maker.wanderer, 6)):
        found = [distances(trainer, exact, maker, [make() for _ in range(count)]) for _ in range(BATCHES)]
        flat, off = (mean(map(mean, each)) for each in zip(*((it.flat_to_flat, it.flat_to_exact) for it in found)))
        print(f"{name}, {kind}: of the norm, flat to flat {flat:.5f}, flat to float32 {off:.5f}", flush=True)
        asked = [
            (
                "flat over the furthest flat to flat",
                1.0,
                [mean(it.forest_to_flat) / max(it.flat_to_flat) for it in found],
            ),
            ("flat over flat to flat", None, [mean(it.forest_to_flat) / mean(it.flat_to_flat) for it in found]),
            ("float32 over flat to float32", 1.03, [mean(it.forest_to_exact) / mean(it.flat_to_exact) for it in found]),
        ]
        for what, target, ratios in asked:
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            rows.append(Row(f"{name}, {kind}: forest to {what}, ± {error:.3f}", mean(ratios), None, "x", target))
            print(f"{rows[-1].name}: {rows[-1].ours:.3f}", flush=True)
    return rows


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__.splitlines()[0])
    flags.add_argument("--lessons", type=int, default=LESSONS, help="steps a model learns before it is asked")
    flags.add_argument("--only", choices=list(LEARNERS), help="ask one of the models taught here")
    args: Any = flags.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return NO_COMPETITOR
    device = torch.cuda.get_device_name()
    rows: list[Row] = []
    tiny, text = resolve_model_path("tiny"), docs()
    teacher = Reader(tiny, lesson(), learning=True)
    for name in [args.only] if args.only else LEARNERS:
        trainer = trainer_of(LEARNERS[name], PACK, {"lr": 1e-3, "schedule": {"warmup_steps": 30}})
        teach(name, trainer, teacher, args.lessons)
        rows += agreement(name, trainer, exactly(trainer, LEARNERS[name]), Reader(tiny, text))
    if args.smollm2:
        trainer = trainer_of(args.smollm2, PACK, {})
        rows += agreement("SmolLM2", trainer, exactly(trainer, args.smollm2), Reader(args.smollm2, text))
    return finish(f"benchmarks/gradients_gpu.py: gradients in bfloat16 on {device}", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
