"""A trainer without a plan chooses the fastest sizes of a step that fit its GPU."""

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.train.config import TrainerConfig
from ramify.train.memory import ModelSize, check_recompute_layers, estimate_rank
from ramify.train.step_sizes import plan_step

GIB = 1 << 30


def plan(gib: float, num_ranks: int = 1, seq_len: int = 2048, **settings) -> tuple[TrainerConfig, list[str]]:
    model = ModelSize.from_name("org/Some-4B")
    assert model is not None
    trainer = TrainerConfig.model_validate(settings)
    planned, reasons = plan_step(trainer, model, seq_len=seq_len, num_ranks=num_ranks, memory=int(gib * GIB))
    needed = estimate_rank(planned, model, gpu=True, num_ranks=num_ranks).with_headroom
    assert needed <= gib * GIB or gib < 40
    return planned, reasons


def test_sizes_shrink_with_the_memory_and_moments_have_8_bits_only_where_float32_does_not_fit():
    planned, reasons = plan(140)
    assert (planned.pack_tokens, planned.recompute_layers, planned.optim.moments) == (16384, 0, "float32")
    assert reasons[0] == "trainer.optim.moments = float32: it fits"
    smaller = [plan(gib)[0] for gib in (100, 85, 60)]
    assert all(trainer.pack_tokens < 16384 or trainer.recompute_layers for trainer in smaller)
    assert [trainer.optim.moments for trainer in smaller] == ["float32", "float32", "8bit"]
    assert "float32 does not fit, it needs at least " in plan(60)[1][0]


def test_a_pack_holds_the_longest_path_and_what_is_set_is_kept():
    assert plan(140, seq_len=20000)[0].pack_tokens == 20096
    planned, reasons = plan(140, pack_tokens=1024, recompute_layers=3, optim={"moments": "8bit"})
    assert (planned.pack_tokens, planned.recompute_layers, planned.optim.moments) == (1024, 3, "8bit")
    assert not reasons


def test_several_ranks_share_the_state_and_have_float32():
    planned, _ = plan(48, num_ranks=8)
    assert planned.optim.moments == "float32" and planned.pack_tokens >= 2048


def test_the_sizes_are_the_smallest_if_nothing_fits():
    planned, _ = plan(8)
    assert (planned.pack_tokens, planned.recompute_layers, planned.optim.moments) == (2048, 31, "8bit")


def test_more_recomputed_layers_than_the_model_has_are_refused():
    with pytest.raises(ConfigInvalid, match=r"trainer\.recompute_layers: the model has 12 layers, got 40"):
        check_recompute_layers(TrainerConfig(recompute_layers=40), 12)


def test_a_pack_holds_several_long_paths_where_recomputed_layers_make_room():
    assert (plan(90, seq_len=2048)[0].pack_tokens, plan(90, seq_len=8192)[0].pack_tokens) == (6144, 16384)
    assert plan(90, seq_len=8192)[0].recompute_layers > plan(90, seq_len=2048)[0].recompute_layers
