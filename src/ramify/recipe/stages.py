"""The stages in which `tiny` is taught: each is conversations in a file, and a run of `ramify sft` on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from ramify.infer.config import ModelConfig
from ramify.recipe.conversation import Conversation
from ramify.recipe.corpus import Shares, conversations
from ramify.recipe.drills import drills
from ramify.train.config import CheckpointConfig, OptimConfig, ScheduleConfig, TrainerConfig
from ramify.train.sft.config import DataConfig, SftConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training, with an optimizer of its own. The rate rises for `warmup` steps."""

    name: str
    rows: Callable[[int], Iterator[Conversation]]
    steps: int
    batch: int
    """Conversations of one step: about 2,000 tokens."""
    warmup: int = 20
    decay: bool = True
    """Whether the rate falls to zero over the last half."""


FORMATS = Shares()
REVERSALS = Shares(reversal=16, backwards=24, tool_use=4, walk=3, sorting=4, guessing=7, drill=6)
EVERYTHING = Shares(reversal=8, backwards=4, tool_use=8, walk=6, sorting=6, guessing=12, drill=4)
CALLS = Shares(reversal=8, backwards=2, tool_use=16, walk=8, sorting=5, guessing=12, drill=3)
LAST = Shares(reversal=16, backwards=4, tool_use=8, walk=10, sorting=10, guessing=10, drill=2, slip=0.42)
STAGES = [
    Stage("drills", drills, 150, 16, warmup=7, decay=False),
    Stage("formats", lambda seed: conversations(seed, FORMATS), 350, 10, warmup=42, decay=False),
    Stage("reversals", lambda seed: conversations(seed + 1, REVERSALS), 400, 14),
    Stage("everything", lambda seed: conversations(seed + 2, EVERYTHING), 450, 10),
    Stage("calls", lambda seed: conversations(seed + 3, CALLS), 550, 8),
    Stage("last", lambda seed: conversations(seed + 4, LAST), 200, 10),
]


def write_rows(stage: Stage, path: Path, seed: int) -> None:
    """The conversations of a stage as jsonl, each of which it sees once."""
    drawn = islice(stage.rows(seed), stage.steps * stage.batch)
    path.write_bytes(b"".join(msgspec.json.encode(made) + b"\n" for made in drawn))


def config_of(stage: Stage, rows: Path, model: Path, output: Path, seed: int) -> SftConfig:
    """The run that teaches `model` the conversations of `rows`: one thread, so that a seed gives the same weights."""
    schedule = ScheduleConfig(warmup_steps=stage.warmup)
    if stage.decay:
        schedule = ScheduleConfig(type="wsd", warmup_steps=stage.warmup, decay_steps=stage.steps // 2)
    optim = OptimConfig(lr=1.2e-3, betas=(0.9, 0.98), weight_decay=0.01, schedule=schedule)
    return SftConfig(
        name=stage.name,
        output=output,
        model=ModelConfig(name=str(model)),
        data=DataConfig(path=str(rows)),
        batch_size=stage.batch,
        seed=seed,
        trainer=TrainerConfig(device="cpu", threads=1, optim=optim),
        checkpoint=CheckpointConfig(interval=stage.steps),
    )
