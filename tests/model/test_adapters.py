"""An engine applies published adapters beside its base model; a model that is loaded from them has them merged."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from ramify.core.errors import WeightsRefused
from ramify.model.fused_model import FusedModel, _run_check_sequence, build_fused_model, build_hf_forward
from ramify.model.kernels.cpu.decoder import CompiledDecoderOps
from ramify.model.kernels.decoder_ops import DecoderOps
from ramify.model.kernels.quantization import QuantizedMatrix, dequantize_matrix, get_levels, quantize_matrix
from ramify.model.load import load_config, load_engine_model, load_hf_model
from ramify.model.lora import LoraLinear, add_engine_adapters, quantize_base, set_matrix
from ramify.model.weights import apply_weights, get_untied_tensors, publish_weights, stage_weights
from ramify.model.weights_manifest import PublishedAdapters, read_tensor_shapes
from ramify.trace.version import PolicyVersion
from ramify.train.memory import QUANTIZED_BYTES
from tests.support.models import HYBRIDS, write_qwen3_5_with_images
from tests.support.training import CONFIGS, build_model

SCALING = 8 / 4


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def base(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "base"
    build_model(CONFIGS[request.param], "eager").save_pretrained(path)
    return path


def load_engine(base: Path, targets=(), quantize=None):
    def add(module, device):
        add_engine_adapters(module, device, 4, 8, targets, quantize)

    return load_engine_model(base, dtype="float32", device="cpu", add_adapters=add)


def publish(module, directory: Path, base: Path, quantize=None) -> Path:
    """Publish random adapters for a model that has some."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in get_untied_tensors(module).items()
    }
    assert tensors and all(".lora_" in name for name in tensors)
    adapters = PublishedAdapters(base, SCALING, quantize)
    return publish_weights(directory, tensors, PolicyVersion("p", 0, 1), base_model=base, adapters=adapters)


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj", "down_proj"]], ids=["all", "some"])
def test_every_forward_of_an_engine_adds_the_adapters(base, tmp_path, targets):
    """Adapters are loaded in place: the C code, the operators in torch and the model's own code see them."""
    module = load_engine(base, targets).module
    with torch.no_grad():
        before = _run_check_sequence(module, build_hf_forward(module))
        fused = build_fused_model(module)
        assert fused is not None and isinstance(fused.ops, CompiledDecoderOps)
        directory = publish(module, tmp_path / "version", base)
        apply_weights(module, stage_weights(directory, module))
        expected = _run_check_sequence(module, build_hf_forward(module))
        compiled = _run_check_sequence(module, fused)
        fused.ops = DecoderOps(fused.sizes)
        plain = _run_check_sequence(module, fused)
    assert (expected - before).abs().max() > 0.1
    for actual in (compiled, plain):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    merged = load_engine_model(directory, dtype="float32", device="cpu").module  # as `ramify serve -m DIR` does
    with torch.no_grad():
        merged_logits = _run_check_sequence(merged, build_hf_forward(merged))
    assert torch.allclose(merged_logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_recurrent_layers_add_the_adapters(family, tmp_path):
    base = HYBRIDS[family](tmp_path / "base")
    model = load_engine(base)
    module, state_specs = model.module, model.state_specs
    fused = build_fused_model(module, state_specs=state_specs)
    assert fused is not None
    with torch.no_grad():
        before = _run_check_sequence(module, fused, state_specs=state_specs)
        apply_weights(module, stage_weights(publish(module, tmp_path / "version", base), module))
        expected = _run_check_sequence(module, build_hf_forward(module), num_chunks=1)
        actual = _run_check_sequence(module, fused, state_specs=state_specs)
    assert (expected - before).abs().max() > 0.1
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_directory_of_adapters_stands_for_the_merged_model(base, tmp_path):
    module = load_engine(base).module
    directory = publish(module, tmp_path / "version", base)
    assert read_tensor_shapes(directory) == read_tensor_shapes(base)
    merged = load_hf_model(directory, load_config(directory), torch.float32, None)
    ids = torch.arange(20)[None] % 60
    with torch.no_grad():
        difference = merged(ids).logits - AutoModelForCausalLM.from_pretrained(base)(ids).logits
    assert difference.abs().max() > 0.1


def test_adapters_of_the_text_part_of_a_vision_language_model_are_merged_into_it(tmp_path):
    base = write_qwen3_5_with_images(tmp_path / "base")
    module = load_engine(base).module
    directory = publish(module, tmp_path / "version", base)
    apply_weights(module, stage_weights(directory, module))
    merged = load_engine_model(directory, dtype="float32", device="cpu").module
    with torch.no_grad():
        expected, actual = (
            _run_check_sequence(each, build_hf_forward(each), num_chunks=1) for each in (module, merged)
        )
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_version_of_another_kind_is_refused(base, tmp_path):
    module = load_engine(base).module
    tensors = load_file(base / "model.safetensors")
    complete = publish_weights(tmp_path / "complete", tensors, PolicyVersion("p"), base_model=base)
    with pytest.raises(WeightsRefused, match="tensors missing"):
        stage_weights(complete, module)
    directory = publish(module, tmp_path / "version", base)
    plain = load_engine_model(base, dtype="float32", device="cpu").module
    with pytest.raises(WeightsRefused, match="unknown tensors"):
        stage_weights(directory, plain)


@pytest.mark.parametrize("mode", ["8bit", "4bit"])
def test_an_engine_rounds_its_base_as_the_trainer_does(base, tmp_path, mode):
    module, plain = (
        load_engine(base, quantize=mode).module,
        load_engine_model(base, dtype="float32", device="cpu").module,
    )
    name = "model.layers.0.self_attn.q_proj"
    rounded = dequantize_matrix(quantize_matrix(plain.get_submodule(name).weight, mode))
    assert torch.equal(module.get_submodule(name).weight, rounded)
    directory = publish(module, tmp_path / "version", base, mode)
    apply_weights(module, stage_weights(directory, module))
    merged = load_hf_model(directory, load_config(directory), torch.float32, None)
    ids = torch.arange(20)[None] % 60
    fused = FusedModel(module)
    assert fused.sizes.adapter_rank == 12  # of queries, keys and values together
    with torch.no_grad():
        linear = module.get_submodule(name)
        rows = torch.randn(3, linear.in_features)
        assert torch.allclose(linear(rows), merged.get_submodule(name)(rows), rtol=1e-4, atol=1e-5)
        assert merged(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("mode", "targets"),
    [
        pytest.param("4bit", [], id="4bit-all"),
        pytest.param("8bit", ["q_proj", "v_proj", "down_proj"], id="8bit-some"),
        pytest.param("8bit", [], id="8bit-all", marks=pytest.mark.full("as with 4 bits")),
        pytest.param("4bit", ["q_proj", "v_proj", "down_proj"], id="4bit-some", marks=pytest.mark.full("as with 8")),
    ],
)
def test_the_fused_forward_multiplies_with_the_codes_of_a_quantized_base(base, tmp_path, mode, targets):
    """Projections of which only some parts are quantized are one dequantized matrix."""
    module, rounded = load_engine(base, targets).module, load_engine(base, targets, mode).module
    quantize_base(module, mode, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        fused = build_fused_model(module)
        assert fused is not None and "quantized" in fused.ops.description
        directory = publish(module, tmp_path / "version", base, mode)
        for model in (module, rounded):
            apply_weights(model, stage_weights(directory, model))
        expected = _run_check_sequence(rounded, build_hf_forward(rounded))
        for forward in (fused, build_hf_forward(module)):
            assert torch.allclose(_run_check_sequence(module, forward), expected, rtol=1e-4, atol=1e-4)
    layer = fused.weights.layers[0]
    matrices = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}
    quantized = {name for name, matrix in matrices.items() if isinstance(matrix, QuantizedMatrix)}
    assert quantized == ({"down"} if targets else set(matrices))
    queries = module.model.layers[0].self_attn.q_proj
    views = queries.weight if targets else queries.weight_codes
    assert views.data_ptr() == (layer.qkv if isinstance(layer.qkv, torch.Tensor) else layer.qkv.codes).data_ptr()


@pytest.mark.parametrize("mode", ["8bit", "4bit"])
def test_a_matrix_on_a_gpu_is_dequantized_by_the_kernel(mode, monkeypatch):
    jit_function = pytest.importorskip("triton").runtime.jit.JITFunction
    launches: list[str] = []
    monkeypatch.setattr(jit_function, "run", lambda kernel, *_, **__: launches.append(kernel.__name__))
    linear = LoraLinear(torch.nn.Linear(64, 6), 2, 4, torch.Generator())
    quantized = quantize_matrix(linear.weight, mode)
    get_levels.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):  # as if there was a GPU
        set_matrix(linear, QuantizedMatrix(*(torch.empty_like(part, device="cuda") for part in quantized)))
        matrix = linear.get_matrix()
    get_levels.cache_clear()
    assert launches == ["_dequantize"] and matrix.shape == (6, 64)


class DeviceBytes(TorchDispatchMode):
    """Counts the bytes of tensors on a device, now and at most; `meta` stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return output

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.mark.parametrize("mode", [pytest.param("8bit", marks=pytest.mark.full("as with 4 bits")), "4bit"])
def test_a_gpu_never_holds_more_than_the_codes_and_one_matrix(tmp_path, mode):
    sizes: Any = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    build_model(LlamaConfig(vocab_size=64, **sizes), "eager").save_pretrained(tmp_path)
    module = load_hf_model(tmp_path, load_config(tmp_path), torch.bfloat16, None)
    counts = [linear.weight.numel() for linear in module.model.layers.modules() if isinstance(linear, torch.nn.Linear)]
    total = sum(parameter.nbytes for parameter in module.parameters())
    device, other_bytes = torch.device("meta"), total - 2 * sum(counts)
    with DeviceBytes() as memory:
        add_engine_adapters(module, device, 2, 4, [], mode)
        module.to(device)
    adapter_bytes = sum(tensor.nbytes for tensor in get_untied_tensors(module).values())
    held = memory.now - adapter_bytes - other_bytes
    assert held == pytest.approx(QUANTIZED_BYTES[mode] * sum(counts), rel=0.01)
    assert memory.most <= memory.now + 24 * max(counts)  # what quantizes a matrix works with
    assert memory.most < total
