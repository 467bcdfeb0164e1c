"""Tokens per second of a training step on CPU: beside a plain padded transformers loop, beside TRL, forest beside flat.

All sides train the same samples in float32 with the same kind of loss and AdamW. At token ratio 1 (no shared prefix)
the comparison is with the padded loop and with TRL, each at the fastest of several micro-batch sizes; at ratio 8 the
forest is compared with the same rollouts as flat sequences. `tiny` runs on one thread, SmolLM2-135M on two.
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

TINY = Path(__file__).parent.parent / "src" / "ramify" / "model" / "bundled" / "tiny"
SINGLE_RANK = Ranks(torch.device("cpu"))
MICRO_BATCH_SIZES = (4, 8, 16)
GROUP_SIZE, PATH_TOKENS, RATIO = 16, 512, 8


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


def build_trace(name: str, example: Example) -> AnnotatedTrace:
    trace = Trace(id=name)
    trace.graph.add_node(-1, Message("user"), np.array(example.prompt, np.int32))
    size = len(example.reply)
    reply = np.array(example.reply, np.int32)
    trace.graph.add_node(
        0, Message("assistant"), reply, sampled_span=(0, size), logprobs=np.full(size, LOGPROB, np.float32)
    )
    return AnnotatedTrace(trace, (Annotation(name, 1, advantage=example.advantage),))


def make_padded_loop(subject: Subject) -> Callable[[int], float]:
    """Return a step of a plain transformers loop: pad, run, gather the logprobs, clip the ratio, step."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        subject.directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    samples = subject.examples()
    tokens = sum(len(example.reply) for example in samples)

    def step(size: int) -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        for part in micro_batches(samples, size):
            width = max(len(example.prompt) + len(example.reply) for example in part)
            ids, mask = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width)
            trained = torch.zeros(len(part), width - 1)
            for row, example in enumerate(part):
                length = len(example.prompt) + len(example.reply)
                ids[row, :length], mask[row, :length] = torch.tensor(example.prompt + example.reply), 1
                trained[row, len(example.prompt) - 1 : length - 1] = 1
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logprob = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio, advantage = (logprob - LOGPROB).exp(), torch.tensor([example.advantage for example in part])[:, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ((loss * trained).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - started

    return step


def make_ramify_step(subject: Subject) -> Callable[[list[Forest]], float]:
    settings: Any = {
        "device": "cpu",
        "dtype": "float32",
        "loss": {"id": "ppo"},
        "optim": {"lr": 1e-7},
        "pack_tokens": 8192,
    }
    trainer = build_trainer(subject.directory, TrainerConfig(**settings), SINGLE_RANK)
    return lambda packs: trainer.step(Batch.from_packs(0, packs)).seconds


def measure_interleaved(*sides: Callable[[], float]) -> list[float]:
    """Return the median seconds of each side; the sides take turns, so that other load affects all alike."""
    for side in sides:
        side()
    runs = [[side() for side in sides] for _ in range(REPETITIONS)]
    return [statistics.median(column) for column in zip(*runs)]


def compare_with_others(subject: Subject, trl_python: str | None, check: bool) -> list[Row]:
    torch.set_num_threads(subject.threads)
    samples = subject.examples()
    tokens = sum(len(example.prompt) + len(example.reply) for example in samples)
    packs = pack_forests(
        [build_forest([build_trace(f"s{index}", example)]) for index, example in enumerate(samples)], 8192
    )
    step, loop = make_ramify_step(subject), make_padded_loop(subject)
    seconds, *others = measure_interleaved(
        lambda: step(packs), *(lambda size=size: loop(size) for size in MICRO_BATCH_SIZES)
    )
    rate = tokens / seconds
    plain = tokens / min(others)
    rows = [Row(f"{subject.name}: ratio 1, beside a padded loop", rate, plain, "tok/s", plain, at_least=True)]
    trl = competitor(trl_python, "_trl.py", "trl==1.16.0", "--trl-python", check, subject.arguments)
    if trl:
        trl_rate = tokens / trl["seconds"]
        rows.append(Row(f"{subject.name}: ratio 1, beside TRL", rate, trl_rate, "tok/s", trl_rate, at_least=True))
    return rows


def compare_forest_with_flat(subject: Subject) -> list[Row]:
    """Compare forest and flat on groups whose paths have `RATIO` times the tokens of their forest."""
    torch.set_num_threads(subject.threads)
    prompt = round(GROUP_SIZE * PATH_TOKENS * (1 - 1 / RATIO) / (GROUP_SIZE - 1))
    rng = np.random.default_rng(0)
    groups: list[list[AnnotatedTrace]] = []
    for index in range(6):
        shared = rng.integers(3, subject.vocabulary, prompt).tolist()
        replies = [rng.integers(3, subject.vocabulary, PATH_TOKENS - prompt).tolist() for _ in range(GROUP_SIZE)]
        groups.append([build_trace(f"{index}/{i}", Example(shared, reply, 1.0)) for i, reply in enumerate(replies)])
    forests = [build_forest(group) for group in groups]
    chains = [build_forest([trace]) for group in groups for trace in group]
    packs, flat = pack_forests(forests, 8192), pack_forests(chains, 8192)
    settings: Any = {"device": "cpu", "dtype": "float32", "optim": {"lr": 1e-7}, "pack_tokens": 8192}
    trainer = build_trainer(subject.directory, TrainerConfig(**settings), SINGLE_RANK)
    forest_seconds, flat_seconds = measure_interleaved(
        *(lambda p=p: trainer.step(Batch.from_packs(0, p)).seconds for p in (packs, flat))
    )
    flops = [sum(map(trainer.flops_model.count_flops, packed)) for packed in (packs, flat)]
    ratio = flops[1] / flops[0]
    tokens = sum(pack.num_tokens for pack in flat) / sum(pack.num_tokens for pack in packs)
    label = f"{subject.name}: forest over flat at {tokens:.1f} x tokens, {ratio:.2f} x FLOPs"
    return [Row(label, flat_seconds / forest_seconds, ratio, "x", 0.85 * ratio, at_least=True)]


def main() -> int:
    flags = parser(__doc__, shown_flags=["--trl-python", "--smollm2"])
    flags.add_argument("--only", choices=["tiny", "smollm2"], help="measure one of the models")
    args: Any = flags.parse_args()
    tiny = Subject("tiny", TINY, 1, 64, (20, 60), (20, 60), 256)
    rows: list[Row] = []
    if args.only != "smollm2":
        rows += compare_forest_with_flat(tiny) + compare_with_others(tiny, args.trl_python, args.check)
    if args.only != "tiny":
        if args.smollm2:
            smollm2 = Subject("SmolLM2", args.smollm2, 2, 16, (40, 90), (20, 60), 49000)
            rows += compare_with_others(smollm2, args.trl_python, args.check)
        elif args.check:
            print("SmolLM2 (--smollm2) is needed for the comparison")
            return NO_COMPETITOR
    return finish("benchmarks/trainer_cpu.py: a training step on CPU", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
