"""Tokens per second of a training step on CPU: beside a plain padded transformers loop, beside TRL, forest beside flat.

All sides train the same samples in float32 with the same kind of loss and AdamW. At token ratio 1 (no shared prefix)
the comparison is with the padded loop and with TRL, each at the fastest of several micro-batch sizes; at ratio 8 the
forest is held against the same rollouts as flat sequences. `tiny` runs on one thread, SmolLM2-135M on two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _check import NO_COMPETITOR, REPETITIONS, Row, competitor, finish, parser
from _samples import LOGPROB, Example, examples, micro_batches

from ramify.trace import AnnotatedTrace, Annotation, Forest, Message, Trace, build_forest
from ramify.train import Batch, TrainerConfig, build_trainer, pack_forests
from ramify.train.distributed import Ranks

TINY = Path(__file__).parent.parent / "src" / "ramify" / "models" / "tiny"
CPU = Ranks(torch.device("cpu"))
SIZES = (4, 8, 16)
GROUP, PATH, RATIO = 16, 512, 8


@dataclass(frozen=True)
class Subject:
    """A model, and the samples it is trained on."""

    name: str
    directory: Path
    threads: int
    count: int
    prompt: tuple[int, int]
    reply: tuple[int, int]
    vocabulary: int

    def examples(self) -> list[Example]:
        return examples(self.count, self.prompt, self.reply, self.vocabulary)

    @property
    def arguments(self) -> list[str]:
        return [str(self.directory), *map(str, (self.threads, self.count, *self.prompt, *self.reply, self.vocabulary))]


def sample(name: str, made: Example) -> AnnotatedTrace:
    trace = Trace(id=name)
    trace.add_node(-1, Message("user"), np.array(made.prompt, np.int32))
    size = len(made.reply)
    reply = np.array(made.reply, np.int32)
    trace.add_node(0, Message("assistant"), reply, sampled_span=(0, size), logprobs=np.full(size, LOGPROB, np.float32))
    return AnnotatedTrace(trace, (Annotation(name, 1, advantage=made.advantage),))


def padded(subject: Subject) -> Callable[[int], float]:
    """The loop everybody writes first: pad, run, gather the logprobs, clip the ratio, step."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        subject.directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    made = subject.examples()
    tokens = sum(len(each.reply) for each in made)

    def step(size: int) -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        for part in micro_batches(made, size):
            width = max(len(each.prompt) + len(each.reply) for each in part)
            ids, seen = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width)
            trained = torch.zeros(len(part), width - 1)
            for row, each in enumerate(part):
                length = len(each.prompt) + len(each.reply)
                ids[row, :length], seen[row, :length] = torch.tensor(each.prompt + each.reply), 1
                trained[row, len(each.prompt) - 1 : length - 1] = 1
            logits = model(ids, attention_mask=seen, use_cache=False).logits[:, :-1]
            logprob = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio, advantage = (logprob - LOGPROB).exp(), torch.tensor([each.advantage for each in part])[:, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ((loss * trained).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - started

    return step


def ours(subject: Subject) -> Callable[[list[Forest]], float]:
    settings: Any = {
        "device": "cpu",
        "dtype": "float32",
        "loss": {"id": "ppo"},
        "optim": {"lr": 1e-7},
        "pack_tokens": 8192,
    }
    trainer = build_trainer(subject.directory, TrainerConfig(**settings), CPU)
    return lambda packs: trainer.step(Batch.from_packs(0, packs)).seconds


def interleaved(*sides: Callable[[], float]) -> list[float]:
    """Medians of runs that take turns, so that what else the machine does hits all sides alike."""
    for side in sides:
        side()
    runs = [[side() for side in sides] for _ in range(REPETITIONS)]
    return [statistics.median(column) for column in zip(*runs)]


def beside_others(subject: Subject, trl_python: str | None, check: bool) -> list[Row]:
    torch.set_num_threads(subject.threads)
    made = subject.examples()
    tokens = sum(len(each.prompt) + len(each.reply) for each in made)
    packs = pack_forests([build_forest([sample(f"s{number}", each)]) for number, each in enumerate(made)], 8192)
    step, loop = ours(subject), padded(subject)
    mine, *others = interleaved(lambda: step(packs), *(lambda size=size: loop(size) for size in SIZES))
    rate = tokens / mine
    plain = tokens / min(others)
    rows = [Row(f"{subject.name}: ratio 1, beside a padded loop", rate, plain, "tok/s", plain, at_least=True)]
    found = competitor(trl_python, "_trl.py", "trl==1.16.0", "--trl-python", check, subject.arguments)
    if found:
        theirs = tokens / found["seconds"]
        rows.append(Row(f"{subject.name}: ratio 1, beside TRL", rate, theirs, "tok/s", theirs, at_least=True))
    return rows


def forest_beside_flat(subject: Subject) -> list[Row]:
    """Groups whose paths have `RATIO` times the tokens of their forest."""
    torch.set_num_threads(subject.threads)
    prompt = round(GROUP * PATH * (1 - 1 / RATIO) / (GROUP - 1))
    rng = np.random.default_rng(0)
    groups: list[list[AnnotatedTrace]] = []
    for number in range(6):
        shared = rng.integers(3, subject.vocabulary, prompt).tolist()
        replies = [rng.integers(3, subject.vocabulary, PATH - prompt).tolist() for _ in range(GROUP)]
        groups.append([sample(f"{number}/{i}", Example(shared, reply, 1.0)) for i, reply in enumerate(replies)])
    together = [build_forest(group) for group in groups]
    apart = [build_forest([each]) for group in groups for each in group]
    packs, flat = pack_forests(together, 8192), pack_forests(apart, 8192)
    settings: Any = {"device": "cpu", "dtype": "float32", "optim": {"lr": 1e-7}, "pack_tokens": 8192}
    trainer = build_trainer(subject.directory, TrainerConfig(**settings), CPU)
    fast, slow = interleaved(*(lambda p=p: trainer.step(Batch.from_packs(0, p)).seconds for p in (packs, flat)))
    flops = [sum(map(trainer.flops_model.count_flops, each)) for each in (packs, flat)]
    ratio = flops[1] / flops[0]
    tokens = sum(each.num_tokens for each in flat) / sum(each.num_tokens for each in packs)
    what = f"{subject.name}: forest over flat at {tokens:.1f} x tokens, {ratio:.2f} x FLOPs"
    return [Row(what, slow / fast, ratio, "x", 0.85 * ratio, at_least=True)]


def main() -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--only", choices=["tiny", "smollm2"], help="measure one of the models")
    args: Any = flags.parse_args()
    tiny = Subject("tiny", TINY, 1, 64, (20, 60), (20, 60), 256)
    rows: list[Row] = []
    if args.only != "smollm2":
        rows += forest_beside_flat(tiny) + beside_others(tiny, args.trl_python, args.check)
    if args.only != "tiny":
        if args.smollm2:
            smollm2 = Subject("SmolLM2", args.smollm2, 2, 16, (40, 90), (20, 60), 49000)
            rows += beside_others(smollm2, args.trl_python, args.check)
        elif args.check:
            print("SmolLM2 (--smollm2) is needed for the comparison")
            return NO_COMPETITOR
    return finish("benchmarks/trainer_cpu.py: a training step on CPU", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
