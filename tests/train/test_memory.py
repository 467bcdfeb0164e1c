"""The size of a model, and the memory of its trainer."""

import json
import math
import shutil

import pytest

from ramify.model.load import load_engine_model
from ramify.model.resolve import resolve_model_path
from ramify.train.config import TrainerConfig
from ramify.train.memory import TORCH_BASE_BYTES, ModelSize, estimate_rank
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
    # 2 key heads and 4 value heads of 8, hidden size 32, inner size 64; 4 heads of attention and 2 of keys, of 8
    assert size.layer_elements == 4 * 32 + 3 * 64 + (2 * (3 * 64 + 3 * 32 + 64 * 4) + 3 * 32 + 3 * 16) // 3
    assert ModelSize.from_name("tiny").state_elements == 0


def test_moments_in_8_bits_take_a_quarter():
    size = ModelSize(2 * 10**9, 20, 2048, 8192, 256, num_outer_parameters=10**8)
    configs = [TrainerConfig().with_moments(moments) for moments in ("float32", "8bit")]
    wide, compact = (estimate_rank(config, size, gpu=True) for config in configs)
    assert wide.total - compact.total == pytest.approx(5.9375 * 1.9e9, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "tokens", "layers", "vocab_size", "gib"),
    [
        ({}, 16384, 8, 39_000, 28.56),
        ({}, 4096, 8, 39_000, 17.52),
        ({"recompute_layers": 4}, 16384, 8, 39_000, 22.11),
        ({"recompute_layers": 8}, 16384, 8, 39_000, 16.41),
        ({}, 16384, 8, 151_936, 37.43),
        ({"optim": {"moments": "8bit"}}, 16384, 36, 39_000, 98.2),
    ],
)
def test_estimates_are_close_to_measured_steps(settings, tokens, layers, vocab_size, gib):
    """The peaks were measured on an H200 in bfloat16, with packs in which half of the tokens are trained."""
    hidden, intermediate, queries, kv = 2560, 9728, 4096, 2048
    outer = vocab_size * hidden
    inner = layers * (hidden * (2 * queries + kv) + 3 * hidden * intermediate)
    sizes = {"num_outer_parameters": outer, "query_elements": queries, "vocab_size": vocab_size}
    model = ModelSize(inner + outer, layers, hidden, intermediate, kv, **sizes)
    config = TrainerConfig.model_validate({"pack_tokens": tokens, **settings})
    estimate = (estimate_rank(config, model, gpu=True).total - TORCH_BASE_BYTES) / 2**30
    assert gib - 0.1 <= estimate <= gib + 3
