"""Two ranks with unequal trees do what one rank does, and what two saved one can load."""

import json
import os
from pathlib import Path

import pytest
import torch

from ramify.train.batch import split_across_ranks
from ramify.train.build import build_trainer, choose_trainer_dtype, get_pack_spec
from ramify.train.checkpoint import CheckpointManager
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks, init_distributed
from ramify.train.publisher import WeightPublisher, iter_merged_weights
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, made
from tests.train.workers import run_ranks

STEPS, SAVED = 20, 10
SHAPES = ["llama", "mixed"] if os.environ.get("RAMIFY_FULL") else ["llama"]
CONFIG = {"threads": 1, "pack_tokens": 128, "optim": {"lr": 1e-3, "max_norm": 1.0, "eps": 1e-4}}


def steps_of(trainer, ranks: Ranks, start: int, stop: int) -> list[tuple[float, float, int]]:
    laying = get_pack_spec(trainer)
    found = []
    for batch in random_batches(stop)[start:]:
        metrics = trainer.step(split_across_ranks(batch, laying, ranks.world_size)[ranks.rank])
        found.append((metrics.loss, metrics.grad_norm, metrics.sums.tokens))
    return found


def as_two(model: Path, folder: Path) -> None:
    config = TrainerConfig.model_validate(CONFIG)
    with init_distributed(config) as ranks:
        trainer = build_trainer(model, config, ranks)
        steps = steps_of(trainer, ranks, 0, SAVED)
        CheckpointManager(folder / "checkpoints", ranks).save(trainer, SAVED, {"ranks": ranks.world_size})
        dtype = choose_trainer_dtype(config, ranks).dtype
        WeightPublisher(folder / "weights", ranks, policy="p", base_model=model, dtype=dtype).publish(trainer, 0, SAVED)
        steps += steps_of(trainer, ranks, SAVED, STEPS)
        weights = dict(iter_merged_weights(trainer))
        if ranks.is_first:
            torch.save({name: value.clone() for name, value in weights.items()}, folder / "final.pt")
            (folder / "steps.json").write_text(json.dumps(steps))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_do_what_one_does_and_their_checkpoint_resumes_on_one(shape, tmp_path):
    model = tmp_path / "model"
    made(CONFIGS[shape], "eager").save_pretrained(model)
    run_ranks(2, as_two, model, tmp_path)
    two = json.loads((tmp_path / "steps.json").read_text())
    config = TrainerConfig.model_validate(CONFIG)
    alone = Ranks(torch.device("cpu"))
    trainer = build_trainer(model, config, alone)
    one = steps_of(trainer, alone, 0, STEPS)
    packs = [len(batch.packs) for batch in random_batches(STEPS)]
    assert 1 in packs  # a rank that had nothing to do
    assert max(packs) > 2
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    final = torch.load(tmp_path / "final.pt")
    for name, value in iter_merged_weights(trainer):
        assert (final[name] - value).norm() <= 1e-5 * value.norm(), name

    again = build_trainer(model, config, alone)
    checkpoints = CheckpointManager(tmp_path / "checkpoints", alone)
    assert checkpoints.load(again, SAVED) == {"ranks": 2}
    for ours, theirs in zip(steps_of(again, alone, SAVED, STEPS), two[SAVED:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
