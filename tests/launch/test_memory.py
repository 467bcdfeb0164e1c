"""The memory of an engine."""

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache

from ramify.infer.config import EngineAdaptersConfig, EngineConfig, EngineLimits, VLLMConfig
from ramify.launch.memory import DEQUANTIZED_PARTS_BYTES, estimate_engine
from ramify.launch.process_configs import build_engine_adapters
from ramify.model.fused_model import FusedModel
from ramify.model.kernels.chunk_plan import MIN_CHUNK_ROWS, plan_chunks
from ramify.model.kernels.paged_attention import StepSequences
from ramify.model.kernels.recurrent_ops import DeltaRuleWeights
from ramify.model.kernels.state_pool import StatePool, StateSpec
from ramify.model.load import load_config, load_engine_model
from ramify.model.lora import add_engine_adapters
from ramify.orchestrate.run_config import RunConfig
from ramify.train.memory import TORCH_BASE_BYTES, ModelSize
from tests.support.models import HYBRIDS, MAMBA2, reference, write_random_model
from tests.support.training import CONFIGS, build_model


def test_states_take_memory_of_the_cache():
    sizes = [ModelSize(10**9, 20, 1024, 4096, 256, state_elements=elements) for elements in (0, 10**6)]
    engine = EngineConfig(kv_cache_tokens=1000, max_running_requests=8, state_snapshots=2)
    plain, recurrent = (estimate_engine(engine, 256, size, num_gpus=1, device_memory=80 << 30) for size in sizes)
    assert recurrent.kv_cache - plain.kv_cache == pytest.approx((8 + 2) * 10**6 * 4)


class PeakAllocation(TorchDispatchMode):
    """Counts the bytes that tensors made by the code in it hold at the same time. Its inputs do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(out):
            if tensor.untyped_storage()._cdata not in inputs:
                self._alive[tensor.untyped_storage()] = None
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return out


def measure_delta_rule(
    key_heads: int, heads: int, key_dim: int, value_dim: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return the bytes that a step takes in a gated delta net, from the result of the first projection to the second.

    Every sequence of the step has as few rows as are computed in chunks. Kernels are not run.
    """
    triton = pytest.importorskip("triton")
    from ramify.model.kernels.cuda.recurrent_ops import compute_delta_rule

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *_, **__: None)
    channels, num_sequences = 2 * key_heads * key_dim + heads * value_dim, num_rows // MIN_CHUNK_ROWS
    sizes = [(channels, 4), (heads,), (heads,), (value_dim,)]
    weights = DeltaRuleWeights(*(torch.empty(size, dtype=torch.bfloat16) for size in sizes), key_heads, key_dim)
    projected = torch.empty(num_rows, sum(weights.widths), dtype=torch.bfloat16)
    specs = [
        StateSpec(0, "conv", 0, (channels, 4), torch.bfloat16),
        StateSpec(0, "recurrent", 0, (heads, key_dim, value_dim), torch.float32),
    ]
    states, bounds = StatePool(specs, 1, torch.device("cpu")), np.arange(num_sequences + 1) * MIN_CHUNK_ROWS
    tables = torch.from_numpy(plan_chunks(bounds[:-1].tolist(), bounds[1:].tolist(), [0] * num_sequences))
    rows = torch.zeros(num_rows, dtype=torch.int32)
    with PeakAllocation() as allocation:
        compute_delta_rule(weights, projected, StepSequences(rows, rows, rows, rows, *tables), states, 0, 1e-6)
    return projected.nbytes + allocation.peak


@pytest.mark.parametrize(
    ("value_heads", "key_dim", "value_dim"),
    [(16, 128, 128), (32, 128, 128), pytest.param(32, 96, 72, id="padded"), pytest.param(16, 32, 48, id="narrow")],
)
def test_chunks_of_prompts_in_a_gated_delta_net_take_memory(tmp_path, value_heads, key_dim, value_dim, monkeypatch):
    """In the shapes of Qwen3.5 and in others, whose heads the kernels pad."""
    config = {"linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "hidden_size": 1024}
    config |= {"num_hidden_layers": 24, "intermediate_size": 16, "num_attention_heads": 8, "head_dim": 32}
    config |= {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}
    config |= {"num_key_value_heads": 2, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((8, 1024), np.float32)}, tmp_path / "model.safetensors")
    size = ModelSize.from_name(str(tmp_path))
    assert size is not None
    limits = {"kv_cache_tokens": 1000, "max_running_requests": 64, "max_num_batched_tokens": 8192}
    use = estimate_engine(EngineConfig(**limits), 256, size, num_gpus=1, device_memory=80 << 30)
    hidden_bytes = 3 * 1024 * 8192 * 2  # the layer's input, its norm and its result
    measured = measure_delta_rule(16, value_heads, key_dim, value_dim, 8192, monkeypatch)
    assert 0 <= use.workspace - TORCH_BASE_BYTES - hidden_bytes - measured <= 0.01 * measured


def test_prompts_in_a_mamba2_layer_take_memory(tmp_path):
    model = write_random_model("bamba", tmp_path, attn_layer_indices=[1], **MAMBA2)
    size, layer = ModelSize.from_name(str(model)), reference(model, "bfloat16").model.layers[0].mamba
    assert size is not None
    rows = torch.zeros(1, 256, size.hidden_size, dtype=torch.bfloat16)
    with torch.no_grad(), PeakAllocation() as allocation:
        layer(rows, cache_params=DynamicCache(config=load_config(model)))
    assert allocation.peak == pytest.approx(256 * 2 * size.recurrent_row_elements, rel=0.1)


@pytest.mark.parametrize(("mode", "bits"), [("8bit", 8.25), ("4bit", 4.25)])
def test_a_quantized_base_takes_its_bits_on_a_gpu_and_all_of_them_on_a_cpu(mode, bits):
    size = ModelSize(10**9, 20, 1024, 4096, 256, num_outer_parameters=10**8)
    run = {"train": [{"taskset": {"id": "reverse-text"}}], "model": {"quantize": mode}}
    for num_gpus, lora, expected in (
        (1, {"rank": 8}, 2 * 10**8 + 9 * 10**8 * bits / 8),
        (1, {"rank": 8, "target_modules": ["q_proj"]}, 2 * 10**9),  # the other matrices are not quantized
        (0, {"rank": 8}, 4 * 10**9),
    ):
        adapters = build_engine_adapters(RunConfig.model_validate({**run, "trainer": {"lora": lora}}))
        settings: Any = {"num_gpus": num_gpus, "device_memory": 80 << 30}
        rounded = estimate_engine(EngineConfig(), 256, size, adapters=adapters, **settings)
        plain = estimate_engine(EngineConfig(), 256, size, adapters=EngineAdaptersConfig(rank=8), **settings)
        assert rounded.weights == pytest.approx(expected, rel=0.02)  # and adapters
        # One complete matrix of the model's own code, and two parts of matrices.
        has_buffers = expected < 2 * 10**9
        assert rounded.workspace - plain.workspace == (DEQUANTIZED_PARTS_BYTES + 1024 * 4096 * 2 if has_buffers else 0)
    settings, adapters = {"num_gpus": 1, "device_memory": 80 << 30}, EngineAdaptersConfig(rank=8, quantize=mode)
    estimate = estimate_engine(EngineConfig(), 256, replace(size, num_active_experts=8), adapters=adapters, **settings)
    assert estimate.weights == pytest.approx(2 * 10**9, rel=0.02)


def test_parts_of_matrices_are_counted_as_the_kernels_dequantize_them():
    pytest.importorskip("triton")
    from ramify.model.kernels.cuda.quantized_products import DEQUANTIZED_PART_BYTES

    assert DEQUANTIZED_PARTS_BYTES == 2 * DEQUANTIZED_PART_BYTES


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "lfm2"])
def test_adapters_of_an_engine_take_memory(tmp_path, family):
    """Fused products have one adapter, with zeros between the adapters of their parts."""
    if family == "qwen3":
        build_model(CONFIGS[family], "eager").save_pretrained(tmp_path / "model")
    else:
        HYBRIDS[family](tmp_path / "model")
    size, engine = ModelSize.from_name(str(tmp_path / "model")), EngineConfig(dtype="float32")
    adapters = EngineAdaptersConfig(rank=4)
    add = partial(add_engine_adapters, **adapters.model_dump())
    module = load_engine_model(tmp_path / "model", dtype="float32", device="cpu", add_adapters=add).module
    parts = [layer.adapters for layer in FusedModel(module).weights.layers]
    num_bytes = 4 * sum(adapter.down.numel() + adapter.up.numel() for adapter in itertools.chain(*parts))
    assert size is not None and num_bytes > 0
    uses = [
        estimate_engine(engine, 256, size, num_gpus=0, device_memory=80 << 30, adapters=beside)
        for beside in (None, adapters)
    ]
    assert num_bytes <= uses[1].weights - uses[0].weights <= 2 * num_bytes


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
