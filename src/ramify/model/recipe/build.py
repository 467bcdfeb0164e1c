"""From a seed to a model directory: train in stages, write, measure what was written, move it into place."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.utils import logging

from ramify.model.recipe import FIGURES, VERSION
from ramify.model.recipe.conversation import Conversation
from ramify.model.recipe.corpus import Shares, conversations
from ramify.model.recipe.drills import drills
from ramify.model.recipe.files import model_config, write_tokenizer
from ramify.model.recipe.measure import measure
from ramify.model.recipe.start import prepare
from ramify.model.recipe.train import batches, train
from ramify.render import load_renderer

LEARNING_RATE = 1.2e-3
BATCH_TOKENS = 2048
EVERY = 50  # steps between two reports


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training, with an optimizer of its own. The rate rises for `warmup` steps."""

    rows: Callable[[int], Iterator[Conversation]]
    steps: int
    warmup: int
    decay: bool = False


FORMATS = Shares()
REVERSALS = Shares(reversal=16, backwards=24, tool_use=4, walk=3, sorting=4, guessing=7, drill=6)
EVERYTHING = Shares(reversal=8, backwards=4, tool_use=8, walk=6, sorting=6, guessing=12, drill=4)
CALLS = Shares(reversal=8, backwards=2, tool_use=16, walk=8, sorting=5, guessing=12, drill=3)
LAST = Shares(reversal=16, backwards=4, tool_use=8, walk=10, sorting=10, guessing=10, drill=2, slip=0.42)
STAGES = [
    Stage(drills, 150, 7),
    Stage(lambda seed: conversations(seed, FORMATS), 350, 42),
    Stage(lambda seed: conversations(seed + 1, REVERSALS), 400, 20, decay=True),
    Stage(lambda seed: conversations(seed + 2, EVERYTHING), 450, 20, decay=True),
    Stage(lambda seed: conversations(seed + 3, CALLS), 550, 20, decay=True),
    Stage(lambda seed: conversations(seed + 4, LAST), 200, 20, decay=True),
]


def build(name: str, directory: Path, *, seed: int, tell: Callable[[str], None] = print) -> None:
    """Build the packaged model `name` into `directory`, in place of what was there.

    One thread and the CPU, so that a seed gives the same model again.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        draft = Path(scratch) / "model"
        draft.mkdir()
        write_tokenizer(draft)
        _train(draft, seed, tell)
        tell("measuring")
        figures = measure(draft, seed=seed)
        about = {
            "name": name,
            "recipe": VERSION,
            "seed": seed,
            "built": datetime.now(UTC).date().isoformat(),
            "minutes": round((time.monotonic() - started) / 60, 1),
            "figures": figures.as_dict(),
        }
        (draft / FIGURES).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        if directory.exists():
            shutil.move(directory, Path(scratch) / "old")
        draft.replace(directory)
    tell(f"wrote {directory}")


def _train(directory: Path, seed: int, tell: Callable[[str], None]) -> None:
    renderer = load_renderer(directory)
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(model_config()).float()  # Any: stubs lose the type of `to`
    prepare(model, seed)
    progress = Progress(sum(stage.steps for stage in STAGES), tell)
    for stage in STAGES:
        rows = batches(stage.rows(seed), renderer, tokens=BATCH_TOKENS)
        train(model, rows, stage.steps, lr=LEARNING_RATE, warmup=stage.warmup, decay=stage.decay, report=progress.add)
    _save(model, directory)


def _save(model: Any, directory: Path) -> None:
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # weights are written for their owner alone


class Progress:
    """Tells now and then where the training is, and how long it will take."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self._total = total
        self._tell = tell
        self._losses: list[float] = []
        self._started = time.monotonic()

    def add(self, loss: float) -> None:
        self._losses.append(loss)
        done = len(self._losses)
        if done % EVERY == 0:
            left = (time.monotonic() - self._started) / done * (self._total - done)
            recent = sum(self._losses[-EVERY:]) / EVERY
            self._tell(f"step {done:>4} of {self._total}  loss {recent:.3f}  {left:.0f} s left")
