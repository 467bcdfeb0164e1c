"""A training step on one GPU: MFU, time per part, forest over flat, gradients in bfloat16, recompilations.

The model is random and has the shape of Qwen3-0.6B; it computes in bfloat16 on float32 master weights, and a step
includes clipping and AdamW. MFU counts each matrix product once, attention over visible pairs only, no recomputation
and no padding, against 989 TFLOP/s; the formula is printed. 16k tokens are 16 sequences of 1,024, 64k are 4 of 16,384.
A step is timed by itself, from a batch at hand to new weights on a chip that has rested, which is how steps of RL come;
and one after the other without a rest, as in SFT, where the chip reaches its power limit and lowers its clock.
Forest over flat runs the same rollouts both ways in packs of 16k tokens: groups of 16 attempts of 1,024 tokens, and
agents with a long main line and forks.

Gradients in bfloat16 should differ no more between a forest and flat paths than between two flat runs that are packed
differently. That is asked of a model that has learned (--smollm2), on text; of the random one it is only shown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _check import NO_COMPETITOR, Row, finish, parser
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from ramify.model.layout import Layout
from ramify.model.tree import ATTENTION
from ramify.trace import Annotation, Forest, Message, Sample, Trace, grow
from ramify.train import Batch, Trainer, TrainerConfig, find_loss, lay_out
from ramify.train.flops import FORMULA, PEAK
from ramify.train.metrics import StepMetrics
from ramify.train.policy import Policy, compile_layers, load_policy
from ramify.train.step import Running

PACK = 16384
RATIOS = (1, 2, 4, 8, 12)
GROUP, PATH = 16, 1024
TURN, FORK = 256, 128  # tokens of a turn on an agent's main line, and of a branch off it
AGENTS = {1: 4, 2: 4, 4: 4, 8: 2, 12: 1}  # ratio: trees in a pack
REST = 0.15  # seconds before a step that is timed by itself
BATCHES = 8  # of which gradients are compared
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


class Maker:
    """Traces of random tokens."""

    def __init__(self, vocabulary: int) -> None:
        self.rng, self.vocabulary, self.names = np.random.default_rng(0), vocabulary, itertools.count()

    def ids(self, size: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, size, dtype=np.int32)

    def reply(self, trace: Trace, parent: int, size: int) -> int:
        trace.add(
            parent, Message("assistant"), self.ids(size), sampled=(0, size), logprobs=np.full(size, -11.0, np.float32)
        )
        return len(trace.nodes) - 1

    def sample(self, trace: Trace) -> Sample:
        sampled = [number for number, node in enumerate(trace.nodes) if node.message.role == "assistant"]
        return Sample(trace, tuple(Annotation(trace.id, node, advantage=float(self.rng.normal())) for node in sampled))

    def chain(self, prompt: np.ndarray, reply: int) -> Sample:
        trace = Trace(id=f"t{next(self.names)}")
        trace.add(-1, Message("user"), prompt)
        self.reply(trace, 0, reply)
        return self.sample(trace)

    def chains(self, count: int, length: int, trained: int) -> list[list[Sample]]:
        return [[self.chain(self.ids(length - trained), trained)] for _ in range(count)]

    def group(self, ratio: float) -> list[Sample]:
        """Attempts at one prompt whose paths have about `ratio` times the tokens of their forest; packs hold it
        without a rest."""
        if ratio == 1:
            return [self.chain(self.ids(PATH // 2), PATH // 2)]
        size = PACK // round(PACK * ratio / (GROUP * PATH))
        reply = (size - PATH) // (GROUP - 1)
        prompt = self.ids(PATH - reply)
        return [self.chain(prompt, reply) for _ in range(GROUP)]

    def uneven(self) -> list[Sample]:
        """Attempts of any length at a prompt of any length."""
        prompt = self.ids(int(self.rng.integers(600, 900)))
        return [self.chain(prompt, int(self.rng.integers(90, 330))) for _ in range(GROUP)]

    def wanderer(self) -> list[Sample]:
        """An agent that begins once or twice, takes turns of any length, and forks anywhere."""
        trace = Trace(id=f"t{next(self.names)}")
        turns: list[int] = []
        for _ in range(self.rng.integers(1, 3)):
            last = -1
            for _ in range(self.rng.integers(3, 9)):
                trace.add(last, Message("user"), self.ids(int(self.rng.integers(40, 260))))
                last = self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(20, 120)))
                turns.append(last)
        for _ in range(self.rng.integers(2, 10)):
            trace.add(int(self.rng.choice(turns)), Message("tool"), self.ids(int(self.rng.integers(30, 120))))
            self.reply(trace, len(trace.nodes) - 1, int(self.rng.integers(30, 120)))
        return [self.sample(trace)]

    def agent(self, ratio: float) -> list[Sample]:
        """A main line of turns and side branches that fork off it evenly, in trees that fill packs."""
        size = PACK // AGENTS[ratio]
        line = TURN * round((size + (size**2 - 8 * FORK * (ratio - 1) * size) ** 0.5) / 2 / TURN)
        trace = Trace(id=f"t{next(self.names)}")
        turns: list[int] = []
        last = -1
        for _ in range(line // TURN):
            trace.add(last, Message("user"), self.ids(TURN * 3 // 4))
            last = self.reply(trace, len(trace.nodes) - 1, TURN // 4)
            turns.append(last)
        forks = (size - line) // FORK
        for number in range(forks):
            place = turns[round((number + 0.5) / forks * (len(turns) - 1))]
            trace.add(place, Message("tool"), self.ids(FORK // 2))
            self.reply(trace, len(trace.nodes) - 1, FORK // 2)
        return [self.sample(trace)]


class Reader(Maker):
    """Traces of text, trained by cross entropy with weights of either sign: what RL is on the policy that sampled."""

    def __init__(self, path: Path) -> None:
        super().__init__(0)
        docs = Path(__file__).parents[1] / "docs"
        names = sorted(set(docs.glob("*.md")) - {docs / "benchmarks.md"})  # which tells of what is found here
        pages = [name.read_text() for name in names]
        words: Any = AutoTokenizer.from_pretrained(path)("\n".join(pages), verbose=False)
        self.text = np.array(words["input_ids"], np.int32)

    def ids(self, size: int) -> np.ndarray:
        start = self.rng.integers(0, len(self.text) - size)
        return self.text[start : start + size]

    def sample(self, trace: Trace) -> Sample:
        notes = super().sample(trace).annotations
        return Sample(trace, tuple(Annotation(note.trace, note.node, ce=note.advantage) for note in notes))


def both(groups: Sequence[list[Sample]]) -> tuple[list[Forest], list[Forest]]:
    """The rollouts as forests and as flat paths."""
    forests = lay_out([grow(group) for group in groups], PACK)
    return forests, lay_out([grow([each]) for group in groups for each in group], PACK, flat=True)


def filled(make: Any, ratio: float, packs: int) -> list[list[Sample]]:
    """As many groups as fill so many packs when laid out as forests."""
    groups: list[list[Sample]] = []
    size = 0
    while True:
        group = make(ratio)
        size += len(grow(group))
        if size > packs * PACK and groups:
            return groups
        groups.append(group)


# -- measuring -----------------------------------------------------------------------------------------------------


def frames() -> int:
    return counters["frames"]["ok"]


def measured(trainer: Trainer, batches: Iterator[list[Forest]], steps: int) -> tuple[StepMetrics, StepMetrics, int]:
    """The median of so many steps on fresh data, by themselves and in a row, where each is begun while the one before
    is computed; and how often something was compiled after the first three."""
    for _ in range(3):
        trainer.step(Batch.of(0, next(batches)))
    before = frames()
    torch.cuda.reset_peak_memory_stats()
    alone: list[StepMetrics] = []
    for _ in range(steps):
        batch = Batch.of(0, next(batches))
        time.sleep(REST)
        alone.append(trainer.step(batch))
    begun: list[Running] = []
    for _ in range(steps):
        begun.append(trainer.begin(Batch.of(0, next(batches))))
        if len(begun) > 1:
            begun[-2].metrics()
    return _middle(alone), _middle([each.metrics() for each in begun]), frames() - before


def _middle(found: list[StepMetrics]) -> StepMetrics:
    return sorted(found, key=lambda each: each.seconds)[len(found) // 2]


def parts(trainer: Trainer, packs: list[Forest]) -> dict[str, float]:
    """Milliseconds of each part of one step, by events on the device."""
    marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    def entered(*_: Any) -> None:
        mark("rows")

    def left(module: Any, given: Any, found: Any) -> None:
        mark("layers")
        found.last_hidden_state.register_hook(lambda grad: mark("head backward"))

    decoder = trainer.policy.model.get_decoder()
    hooks = [decoder.register_forward_pre_hook(entered), decoder.register_forward_hook(left)]
    torch.cuda.synchronize()
    mark("start")
    trainer.masters.zero_grad()
    batch = Batch.of(0, packs)
    for pack in packs:
        seen = trainer.policy(trainer.row(pack), batch.counts)
        mark("head and loss")
        seen.loss.backward()
        trainer.masters.collect()
        mark("layers backward")
    trainer.update(0)
    mark("clip and optimizer")
    torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    found: dict[str, float] = {}
    for (_, before), (name, after) in itertools.pairwise(marks):
        found[name] = found.get(name, 0.0) + before.elapsed_time(after)
    return found


def shown(title: str, trainer: Trainer, packs: list[Forest], alone: StepMetrics, row: StepMetrics) -> None:
    memory = torch.cuda.max_memory_allocated() / 2**30
    timed = ", ".join(f"{name} {ms:.1f}" for name, ms in parts(trainer, packs).items())
    told = [f"{1e3 * each.seconds:.1f} ms, {each.tokens_per_second / 1e3:.1f}k tok/s" for each in (alone, row)]
    print(f"{title}: by itself {told[0]}, in a row {told[1]}; {memory:.1f} GiB; ms: {timed}", flush=True)


# -- the questions -------------------------------------------------------------------------------------------------


def utilisation(trainer: Trainer, maker: Maker) -> tuple[list[Row], int]:
    cases = [
        ("16k tokens, all trained", 16, PATH, PATH - 1, 10, 40.0),
        ("16k tokens, an eighth trained", 16, PATH, PATH // 8, 10, 46.0),
        ("64k tokens, all trained", 4, 16 * PATH, 16 * PATH - 1, 4, 40.0),
    ]
    rows: list[Row] = []
    compiled = 0
    for name, count, length, trained, steps, target in cases:

        def batches(count: int = count, length: int = length, trained: int = trained) -> Iterator[list[Forest]]:
            while True:
                yield lay_out([grow(each) for each in maker.chains(count, length, trained)], count * length)

        alone, in_a_row, again = measured(trainer, batches(), steps)
        compiled += again
        shown(name, trainer, next(batches()), alone, in_a_row)
        rows.append(Row(f"MFU, {name}", 100 * (alone.mfu or 0.0), None, "%", target, at_least=True))
        rows.append(Row(f"MFU, {name}, steps in a row", 100 * (in_a_row.mfu or 0.0), None, "%", None))
    return rows, compiled


def speed_up(trainer: Trainer, maker: Maker, packs: int) -> tuple[list[Row], int]:
    rows: list[Row] = []
    compiled = 0
    for name, make in (("groups of 16", maker.group), ("agents with forks", maker.agent)):
        for ratio in RATIOS:
            forests, flat = both(filled(make, ratio, packs))
            seconds: list[float] = []
            for each in (forests, flat):
                trainer.step(Batch.of(0, each))  # every length of row once
                before = frames()
                seconds.append(statistics.mean(trainer.step(Batch.of(0, each)).seconds for _ in range(2)))
                compiled += frames() - before
            flops = sum(map(trainer.cost.flops, flat)) / sum(map(trainer.cost.flops, forests))
            tokens = sum(each.tokens for each in flat) / sum(each.tokens for each in forests)
            what = f"{name}, forest over flat: {tokens:.2f} x tokens, {flops:.2f} x FLOPs"
            rows.append(Row(what, seconds[1] / seconds[0], flops, "x", 0.9 * flops, at_least=True))
            full = " and ".join(f"{len(each)} packs {_fill(each):.0%} full" for each in (forests, flat))
            print(f"{what}: {seconds[1] / seconds[0]:.2f} x faster, {full}", flush=True)
    return rows, compiled


def _fill(packs: list[Forest]) -> float:
    return sum(each.tokens for each in packs) / (PACK * len(packs))


def gradients(trainer: Trainer, packs: list[Forest]) -> torch.Tensor:
    trainer.differentiate(Batch.of(0, packs))
    trainer.masters.settle()
    return torch.cat([master.grad.flatten() for master in trainer.masters.parameters() if master.grad is not None])


def agreement(trainer: Trainer, exact: Trainer, maker: Maker, checked: bool) -> list[Row]:
    """Forest and flat in bfloat16 beside flat runs that are packed differently, and how far each is from the gradient
    in float32: means over batches, and what two standard errors of them allow. Lengths are those of real rollouts,
    uneven: paths of whole blocks would be rounded alike in all packings. Groups, and trees with forks and several
    roots; in the small packs trees are cut."""
    rows: list[Row] = []
    for kind, make, count in (("groups", maker.uneven, 2), ("trees", maker.wanderer, 6)):
        found = [distances(trainer, exact, maker, [make() for _ in range(count)]) for _ in range(BATCHES)]
        mean = {name: statistics.mean(each[name] for each in found) for name in found[0]}
        told = [f"{name} {each:.5f}" for name, each in mean.items()]
        for ours, theirs in (("forest to flat", "flat to flat"), ("forest to float32", "flat to float32")):
            ratios = [each[ours] / each[theirs] for each in found]
            ratio, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
            told.append(f"{ours} over {theirs} {ratio:.3f} ± {error:.3f}")
            name = f"{kind}, bfloat16: {ours} over {theirs}"
            rows.append(Row(name, ratio, None, "x", 1 + 2 * error if checked else None))
        print(f"{kind}, gradients in bfloat16, of the norm: {', '.join(told)}", flush=True)
    return rows


def distances(trainer: Trainer, exact: Trainer, maker: Maker, groups: list[list[Sample]]) -> dict[str, float]:
    """Between the gradients of a batch, on average over its packings."""

    def mixed(forests: list[Forest]) -> list[Forest]:
        return [forests[number] for number in maker.rng.permutation(len(forests))]

    def apart(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return statistics.mean(float((left - right).norm() / right.norm()) for left, right in pairs)

    flat, trees = [grow([each]) for group in groups for each in group], [grow(group) for group in groups]
    ways = [(flat, PACK), (mixed(flat), PACK), (flat[::-1], PACK // 2), (mixed(flat), PACK // 4)]
    runs = [gradients(trainer, lay_out(each, size, flat=True)) for each, size in ways]
    ways = [(trees, PACK), (mixed(trees), PACK), (trees[::-1], PACK // 4)]
    forests = [gradients(trainer, lay_out(each, size)) for each, size in ways]
    truth = [gradients(exact, lay_out(flat, PACK, flat=True))]
    return {
        "flat to flat": apart(itertools.combinations(runs, 2)),
        "forest to flat": apart(itertools.product(forests, runs)),
        "flat to float32": apart(itertools.product(runs, truth)),
        "forest to float32": apart(itertools.product(forests, truth)),
    }


def trainer_of(model: str | Path, pack: int, dtype: torch.dtype = torch.bfloat16) -> Trainer:
    """Of a random model of a shape, or of the one in a directory, with weights that bfloat16 can hold."""
    torch.manual_seed(0)
    loss = find_loss("dppo")
    if isinstance(model, Path):
        policy = load_policy(model, loss, device=torch.device("cuda"))
    else:
        with torch.device("cuda"):
            made = AutoModelForCausalLM.from_config(SHAPES[model], attn_implementation=ATTENTION, dtype=torch.float32)
        policy = Policy(made, Layout.FOREST, loss)
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16().float()  # one model, in whatever it computes
    compile_layers(policy)
    settings: Any = {"device": "cuda", "pack_tokens": pack, "optim": {"lr": 1e-6}}
    return Trainer(policy, TrainerConfig(**settings), dtype=dtype)


def speed(trainer: Trainer, maker: Maker, args: Any) -> list[Row]:
    """What was asked for of MFU and of forest over flat, and whether anything was compiled late."""
    rows: list[Row] = []
    compiled = 0
    if args.only != "forest":
        found, again = utilisation(trainer, maker)
        rows, compiled = rows + found, compiled + again
    if args.only != "mfu":
        found, again = speed_up(trainer, maker, args.packs)
        rows, compiled = rows + found, compiled + again
    return [*rows, Row("compilations after the third step", float(compiled), None, "", 0.0)]


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__.splitlines()[0])
    flags.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    flags.add_argument("--packs", type=int, default=4, help="packs of 16k tokens the forests of a comparison fill")
    flags.add_argument("--only", choices=["mfu", "forest", "gradients"], help="ask one of the questions")
    args: Any = flags.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return NO_COMPETITOR
    if args.check and args.only == "gradients" and not args.smollm2:
        print(
            "of a random model gradients are only shown: SmolLM2 (--smollm2) is needed to check them", file=sys.stderr
        )
        return NO_COMPETITOR
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {args.shape}\nFLOPs = {FORMULA}")
    print(f"MFU against {PEAK['H200'] / 1e12:.0f} TFLOP/s", flush=True)
    maker = Maker(SHAPES[args.shape].vocab_size)
    rows: list[Row] = []
    if args.only != "gradients":
        rows += speed(trainer_of(args.shape, 4 * PACK), maker, args)
    if args.only in (None, "gradients"):
        maker = Reader(args.smollm2) if args.smollm2 else maker
        computed = (trainer_of(args.smollm2 or args.shape, PACK, dtype) for dtype in (torch.bfloat16, torch.float32))
        rows += agreement(*computed, maker, checked=args.smollm2 is not None)
    return finish(f"benchmarks/trainer_gpu.py: a training step on {name}", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
