"""The training stages of `tiny`: each is a file of conversations and a run of `ramify sft` on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ramify.train.config import CheckpointConfig, OptimConfig, ScheduleConfig, TrainedModelConfig, TrainerConfig
from ramify.train.sft.config import SftConfig, SftDataConfig
from tools.tiny.conversation import DrillConversation
from tools.tiny.corpus import CorpusMix, draw_conversations
from tools.tiny.drills import draw_drills


@dataclass(frozen=True, slots=True)
class SftStage:
    """A part of the training, with an optimizer of its own. The rate rises for `warmup` steps."""

    name: str
    draw: Callable[[int], Iterator[DrillConversation | dict[str, Any]]]
    """Draws conversations, or rows of a dataset, from a seed."""
    steps: int
    batch_size: int
    """Conversations of one step: about 2,000 tokens."""
    warmup_steps: int = 20
    decay: bool = True
    """Whether the rate falls to zero over the last half."""


FORMATS_MIX = CorpusMix()
REVERSALS_MIX = CorpusMix(reversal=16, reversal_drill=24, tool_use=4, walk=3, sorting=4, guessing=7, drill=6)
EVERYTHING_MIX = CorpusMix(reversal=8, reversal_drill=4, tool_use=8, walk=6, sorting=6, guessing=12, drill=4)
CALLS_MIX = CorpusMix(reversal=8, reversal_drill=2, tool_use=16, walk=8, sorting=5, guessing=12, drill=3)
LAST_MIX = CorpusMix(
    reversal=16, reversal_drill=4, tool_use=8, walk=10, sorting=10, guessing=10, drill=2, slip_prob=0.42
)
STAGES = [
    SftStage("drills", draw_drills, 150, 16, warmup_steps=7, decay=False),
    SftStage("formats", lambda seed: draw_conversations(seed, FORMATS_MIX), 350, 10, warmup_steps=42, decay=False),
    SftStage("reversals", lambda seed: draw_conversations(seed + 1, REVERSALS_MIX), 400, 14),
    SftStage("everything", lambda seed: draw_conversations(seed + 2, EVERYTHING_MIX), 450, 10),
    SftStage("calls", lambda seed: draw_conversations(seed + 3, CALLS_MIX), 550, 8),
    SftStage("last", lambda seed: draw_conversations(seed + 4, LAST_MIX), 200, 10),
]


def write_stage_data(stage: SftStage, path: Path, seed: int) -> None:
    """The conversations of a stage as jsonl, each of which it sees once."""
    drawn = islice(stage.draw(seed), stage.steps * stage.batch_size)
    path.write_bytes(b"".join(msgspec.json.encode(conversation) + b"\n" for conversation in drawn))


def build_sft_config(stage: SftStage, data_path: Path, model: Path, output: Path, seed: int) -> SftConfig:
    """The run that teaches `model` the conversations of `rows`: one thread, so that a seed gives the same weights."""
    schedule = ScheduleConfig(warmup_steps=stage.warmup_steps)
    if stage.decay:
        schedule = ScheduleConfig(type="wsd", warmup_steps=stage.warmup_steps, decay_steps=stage.steps // 2)
    optim = OptimConfig(lr=1.2e-3, betas=(0.9, 0.98), weight_decay=0.01, schedule=schedule)
    return SftConfig(
        name=stage.name,
        output=output,
        model=TrainedModelConfig(name=str(model)),
        data=SftDataConfig(path=str(data_path)),
        batch_size=stage.batch_size,
        seed=seed,
        trainer=TrainerConfig(device="cpu", threads=1, optim=optim),
        checkpoint=CheckpointConfig(interval=stage.steps),
    )
