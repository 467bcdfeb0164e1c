"""The memory of an engine."""

from dataclasses import replace
from typing import Any

import pytest

from ramify.infer.config import EngineConfig, EngineLimits, VLLMConfig
from ramify.launch.memory import estimate_engine, find_engine_format
from ramify.orchestrate.run_config import RunConfig
from ramify.train.memory import ModelSize


def test_states_take_memory_of_the_cache():
    sizes = [ModelSize(10**9, 20, 1024, 4096, 256, state_elements=elements) for elements in (0, 10**6)]
    engine = EngineConfig(kv_cache_tokens=1000, max_running_requests=8, state_snapshots=2)
    plain, recurrent = (estimate_engine(engine, 256, size, num_gpus=1, device_memory=80 << 30) for size in sizes)
    assert recurrent.kv_cache - plain.kv_cache == pytest.approx((8 + 2) * 10**6 * 4)


@pytest.mark.parametrize(("mode", "bits"), [("8bit", 8.25), ("4bit", 4.25)])
def test_a_quantized_base_takes_its_bits_on_a_gpu_and_all_of_them_on_a_cpu(mode, bits):
    size = ModelSize(10**9, 20, 1024, 4096, 256, num_outer_parameters=10**8)
    run = {"train": [{"taskset": {"id": "reverse-text"}}], "model": {"quantize": mode}}
    for num_gpus, lora, expected in (
        (1, {"rank": 8}, 2 * 10**8 + 9 * 10**8 * bits / 8),
        (1, {"rank": 8, "target_modules": ["q_proj"]}, 2 * 10**9),  # the other matrices are not quantized
        (0, {"rank": 8}, 4 * 10**9),
    ):
        config = RunConfig.model_validate({**run, "trainer": {"lora": lora}})
        engine_format = find_engine_format(config)
        settings: Any = {"num_gpus": num_gpus, "device_memory": 80 << 30, "quantize": engine_format}
        assert estimate_engine(EngineConfig(), 256, size, **settings).weights == pytest.approx(expected)
    experts = replace(size, experts_note="experts: 8 of 128 process a token")
    estimate = estimate_engine(EngineConfig(), 256, experts, num_gpus=1, device_memory=80 << 30, quantize=mode)
    assert estimate.weights == 2 * 10**9


def test_weights_of_an_engine_are_split_over_its_gpus():
    size, engine = ModelSize(10**10, 20, 1024, 4096, 256), VLLMConfig(gpu_memory_utilization=0.01)
    one, two = (estimate_engine(engine, 256, size, num_gpus=gpus, device_memory=80 << 30) for gpus in (1, 2))
    assert one.weights - two.weights == pytest.approx(10**10, rel=0.01)


def test_limits_that_no_plan_has_chosen_depend_on_the_device():
    limits = [EngineConfig().get_limits(gpu=gpu) for gpu in (False, True)]
    assert limits == [EngineLimits(64, 1024, 0.4, 128), EngineLimits(256, 8192, 0.85, 512)]
    few_tokens = EngineConfig(max_num_batched_tokens=24, prefix_cache=False).get_limits(gpu=False)
    assert few_tokens == EngineLimits(24, 24, 0.4, 0)
    assert EngineConfig(max_running_requests=2000).get_limits(gpu=False).max_num_batched_tokens == 2000
