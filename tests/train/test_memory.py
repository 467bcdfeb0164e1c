"""The size of a model, and the memory of its trainer."""

import json
import math
import shutil

import pytest

from ramify.model.load import load_engine_model
from ramify.model.resolve import resolve_model_path
from ramify.train.config import TrainerConfig
from ramify.train.memory import MAX_MEMORY_FRACTION, ModelSize, estimate_rank
from tests.support.models import write_qwen3_next


def test_model_size_is_read_or_guessed():
    assert 1_000_000 < ModelSize.from_name("tiny").num_parameters < 3_000_000
    assert ModelSize.from_name("org/Some-7B-Instruct").num_parameters == 7 * 10**9
    assert ModelSize.from_name("org/SmolLM2-135M").num_parameters == 135 * 10**6
    assert ModelSize.from_name("org/no-size") is None


def test_null_in_a_model_config_means_the_default(tmp_path):
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_key_value_heads": None, "text_config": None}))
    assert ModelSize.from_name(str(tmp_path / "model")) == ModelSize.from_name("tiny")


def test_a_model_with_recurrent_layers_has_their_states(tmp_path):
    types = ["linear_attention", "linear_attention", "full_attention"]
    model = write_qwen3_next(tmp_path / "model", num_hidden_layers=3, layer_types=types)
    size, specs = ModelSize.from_name(str(model)), load_engine_model(model, dtype="float32", device="cpu").state_specs
    assert size is not None
    assert size.num_kv_layers == 1
    assert size.state_elements == sum(math.prod(spec.shape) for spec in specs) > 0
    assert ModelSize.from_name("tiny").state_elements == 0


def test_moments_in_8_bits_take_a_quarter():
    size = ModelSize(2 * 10**9, 20, 2048, 8192, 256, num_outer_parameters=10**8)
    configs = [TrainerConfig().with_moments(moments) for moments in ("float32", "8bit")]
    wide, compact = (estimate_rank(config, size, gpu=True) for config in configs)
    assert (wide - compact) * MAX_MEMORY_FRACTION == pytest.approx(5.9375 * 1.9e9, rel=1e-6)
