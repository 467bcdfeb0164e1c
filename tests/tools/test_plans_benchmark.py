"""The benchmark of plans also tries refused cases by hand, and a case has the same engine as a run."""

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.core.errors import GpuMemoryFull
from ramify.model.lora import LoraLinear

CASE = {"number": 7, "model": "0.5b", "lora": False, "seq_len": 4096, "group": 4, "memory": 6}
HUGE_PACK = 16_384


@pytest.fixture
def plans_gpu(load_benchmark) -> Any:
    return load_benchmark("plans_gpu")


@pytest.mark.parametrize(("hand", "outcome"), [([], "refused"), ([7], "not finished")])
def test_a_refused_case_runs_only_by_hand(plans_gpu, load_benchmark, tmp_path, capsys, hand, outcome):
    load_benchmark("_random_qwen").write_shapes(tmp_path / "0.5b", "0.5b")
    args = Namespace(hand=hand, limit=0.0, output=tmp_path, case_timeout=1.0)
    assert [result["outcome"] for result in plans_gpu.run_all([CASE], tmp_path, args)] == [outcome]


@pytest.mark.parametrize("fitting", [[], ["packs of 8192 tokens, 28 recomputed layers"]])
def test_a_refused_case_that_fits_by_hand_misses_its_target(plans_gpu, fitting):
    rows = plans_gpu.build_rows([{**CASE, "outcome": "refused", "fits_by_hand": fitting}])
    assert all(row.met for row in rows) == (not fitting)


class SmallTrainer:
    """A trainer that has room for packs of less than HUGE_PACK tokens, of which it lowers some and fails for others."""

    def __init__(self) -> None:
        self.activations: Any = SimpleNamespace(limits=None, set_limits=self._set_limits)
        self.policy = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4)))

    def _set_limits(self, limits: Any) -> None:
        self.activations.limits = limits

    def step(self, batch: Any) -> str:
        limits = self.activations.limits
        if limits.pack_tokens == HUGE_PACK and limits.recompute_layers:
            raise GpuMemoryFull("the GPU has no room")
        if limits.pack_tokens == HUGE_PACK:
            self.activations.limits = "lowered"
        return "metrics"

    def free_memory(self) -> None:
        pass


def test_settings_fit_if_the_trainer_takes_them_as_they_are(plans_gpu):
    fitting = plans_gpu.list_fitting_limits(SmallTrainer(), {**CASE, "seq_len": 512})
    assert fitting == [
        "packs of 8192 tokens, 0 recomputed layers",
        "packs of 8192 tokens, 4 recomputed layers",
        "packs of 4096 tokens, 0 recomputed layers",
        "packs of 4096 tokens, 2 recomputed layers",
    ]


@pytest.mark.parametrize(("flag", "number"), [("--only", 25), ("--only", -1), ("--hand", 20)])
def test_only_the_numbers_of_configurations_are_accepted(plans_gpu, monkeypatch, capsys, flag, number):
    monkeypatch.setattr(sys, "argv", ["plans_gpu.py", "--plan-only", f"{flag}={number}"])
    with pytest.raises(SystemExit, match="2"):
        plans_gpu.main()
    assert f"configuration {number} does not exist; --only and --hand take 0 to 19" in capsys.readouterr().err


def test_settings_by_hand_do_not_repeat(plans_gpu):
    assert plans_gpu.list_hand_limits({**CASE, "seq_len": 16_384}, 4) == [(16_384, 0), (16_384, 4), (16_384, 2)]


def test_the_engine_of_a_case_with_adapters_has_them(plans_gpu):
    config = plans_gpu.plan_case({**CASE, "lora": True, "seq_len": 512}, "tiny").config
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"kv_cache_tokens": 512})})
    core = plans_gpu.start_engine("tiny", config)
    assert any(isinstance(module, LoraLinear) for module in core.model.module.modules())
