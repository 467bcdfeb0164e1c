"""The size of a model, from which its memory is estimated."""

import json
import math
import shutil

import pytest

from ramify.infer.config import EngineConfig, VLLMConfig
from ramify.launch.memory import MAX_MEMORY_FRACTION, ModelSize, estimate_engine, estimate_trainer
from ramify.model.load import load_engine_model
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.run_config import RunConfig
from tests.support.models import write_qwen3_next

TRAIN = {"taskset": {"id": "reverse-text"}}


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


def test_moments_in_8_bits_take_a_quarter(tmp_path):
    size = ModelSize(2 * 10**9, 20, 2048, 8192, 256, num_outer_parameters=10**8)
    runs = [RunConfig(train=[TRAIN], trainer={"optim": {"moments": moments}}) for moments in ("float32", "8bit")]
    wide, compact = (estimate_trainer(run, size, gpu=True, num_ranks=1) for run in runs)
    assert (wide - compact) * MAX_MEMORY_FRACTION == pytest.approx(5.9375 * 1.9e9, rel=1e-6)


def test_states_take_memory_of_the_cache():
    sizes = [ModelSize(10**9, 20, 1024, 4096, 256, state_elements=elements) for elements in (0, 10**6)]
    engine = EngineConfig(kv_cache_tokens=1000, max_running_requests=8, state_snapshots=2)
    plain, recurrent = (estimate_engine(engine, 256, size, num_gpus=1, device_memory=80 << 30) for size in sizes)
    assert (recurrent - plain) * MAX_MEMORY_FRACTION == pytest.approx((8 + 2) * 10**6 * 4)


def test_weights_of_an_engine_are_split_over_its_gpus():
    size, engine = ModelSize(10**10, 20, 1024, 4096, 256), VLLMConfig(gpu_memory_utilization=0.01)
    one, two = (estimate_engine(engine, 256, size, num_gpus=gpus, device_memory=80 << 30) for gpus in (1, 2))
    assert (one - two) * MAX_MEMORY_FRACTION == pytest.approx(10**10, rel=0.01)
