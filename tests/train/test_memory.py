"""The size of a model, and the memory of its trainer."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Idefics3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from ramify.cli.model import read_model_info
from ramify.infer.config import EngineConfig
from ramify.launch.memory import estimate_engine
from ramify.model.load import load_config, load_engine_model, load_hf_model
from ramify.model.lora import add_adapters
from ramify.model.pack_layout import TEXT_PART_MODEL_TYPES
from ramify.model.precision import choose_dtype
from ramify.model.resolve import resolve_model_path
from ramify.model.vision import get_vision_tower
from ramify.model.weights_manifest import read_tensor_shapes
from ramify.train.config import TrainerConfig
from ramify.train.memory import (
    TORCH_BASE_BYTES,
    MemoryUse,
    ModelSize,
    VisionSize,
    count_trained,
    count_weight_bytes,
    estimate_rank,
)
from tests.support.models import (
    FAMILIES,
    HYBRIDS,
    MAMBA2,
    VISION_CONFIGS,
    process,
    write_lfm2,
    write_qwen3_5,
    write_qwen3_5_with_images,
    write_qwen3_next,
    write_random_model,
    write_vision_model,
)
from tests.support.training import CONFIGS, build_model

RECOMPUTED = {"recompute_layers": 1}


def test_model_size_is_read_or_guessed():
    assert 1_000_000 < ModelSize.from_name("tiny").num_parameters < 3_000_000
    assert ModelSize.from_name("org/Some-7B-Instruct").num_parameters == 7 * 10**9
    assert ModelSize.from_name("org/SmolLM2-135M").num_parameters == 135 * 10**6
    assert ModelSize.from_name("org/no-size") is None


def test_a_mixture_of_experts_has_the_width_of_its_active_parameters():
    mixture, dense = ModelSize.from_name("Qwen/Qwen3-30B-A3B-Instruct-2507"), ModelSize.from_name("org/Some-30B")
    assert mixture.num_parameters == dense.num_parameters == 30 * 10**9
    assert (mixture.num_layers, dense.num_layers) == (47, 47)  # Qwen3-30B-A3B has 48, with a hidden size of 2,048
    assert mixture.hidden_size == 2176 and dense.hidden_size > 6000
    assert mixture.num_outer_parameters < dense.num_outer_parameters
    assert mixture.layer_elements * mixture.num_layers == pytest.approx(48 * (20 * 2048 + 3 * 6144 + 13824), rel=0.1)


def test_a_mixture_of_experts_is_never_counted_as_quantized():
    for size in (ModelSize.from_name("org/Some-30B-A3B"), ModelSize(30 * 10**9, num_active_experts=8)):
        assert size is not None and count_weight_bytes(size, 2, "4bit") == 2 * 30 * 10**9


def test_the_experts_of_a_token_have_the_activations_that_autograd_keeps():
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128}
    experts = {"moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 8}

    def count_kept(config) -> float:
        """Return the elements that the backward pass of one layer keeps per token."""
        model, ids = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), torch.arange(512)[None] % 128
        return count_kept_bytes(model, lambda: model.model(input_ids=ids, use_cache=False)) / 2 / 512

    dense = count_kept(Qwen3Config(num_hidden_layers=1, intermediate_size=8 * 96, **sizes))
    mixture = count_kept(Qwen3MoeConfig(num_hidden_layers=1, **experts, **sizes))
    plain, sparse = (ModelSize(10**9, 1, 256, 768, 128, num_active_experts=number) for number in (0, 8))
    assert sparse.layer_elements - plain.layer_elements == pytest.approx(mixture - dense, rel=0.1)


def count_kept_bytes(module: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of the tensors that autograd keeps for the backward pass, without the module's weights."""
    kept, weights = dict[int, int](), {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    tensors = list[torch.Tensor]()  # so that no address is used again

    def record(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        forward()
    return sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in weights)


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
    # 2 key heads and 4 value heads of 8, hidden size 32, inner size 64; 4 heads of attention and 2 of keys, of 8;
    # 2 experts process a token
    assert size.layer_elements == (4 + 2 * 2) * 32 + 3 * 64 + (2 * (3 * 64 + 3 * 32 + 64 * 4) + 3 * 32 + 3 * 16) // 3
    assert ModelSize.from_name("tiny").state_elements == 0


def test_only_what_is_loaded_of_a_vision_language_model_is_counted(tmp_path):
    directory = write_qwen3_5_with_images(tmp_path / "model")
    loaded = load_engine_model(directory, device="cpu")
    assert loaded.dtype_choice == choose_dtype("auto", "bfloat16", torch.device("cpu"))  # as its text config says
    num_parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    size = ModelSize.from_name(str(directory))
    assert size == ModelSize.from_name(str(write_qwen3_5(tmp_path / "text")))
    assert size is not None and size.num_parameters == num_parameters == read_model_info(str(directory)).num_parameters


@pytest.mark.full("imports the code of all causal language models")
def test_the_table_of_models_that_are_loaded_as_text_is_that_of_transformers():
    text_only = set()
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        text_class = config_class.sub_configs.get("text_config")
        if text_class is not None and model_class.config_class is text_class:
            text_only.add(config_class.model_type)
    assert text_only == TEXT_PART_MODEL_TYPES


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("granitemoehybrid", {"layer_types": ["mamba", "attention"]}), ("bamba", {"attn_layer_indices": [1]})],
)
def test_models_with_mamba2_have_their_states(model_type, layers, tmp_path):
    model = write_random_model(model_type, tmp_path / "model", **layers, **MAMBA2)
    size, specs = ModelSize.from_name(str(model)), load_engine_model(model, dtype="float32", device="cpu").state_specs
    assert size is not None
    assert size.num_kv_layers == 1
    assert size.state_elements == sum(math.prod(spec.shape) for spec in specs) > 0
    # 2 groups of keys of 8, 4 heads of 16, hidden size 32; the activations of a gated delta net without inverses
    assert size.mixer_elements == 3 * (2 * 16 + 64) + 3 * 64
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **layers}))  # as published: transformers renames layers
    assert ModelSize.from_name(str(model)) == size


@pytest.mark.parametrize("is_adjusted", [False, True])
def test_the_inner_width_of_lfm2_is_read_from_its_weights(tmp_path, is_adjusted):
    settings = {"intermediate_size": 96, "block_auto_adjust_ff_dim": is_adjusted, "block_multiple_of": 8}
    size = ModelSize.from_name(str(write_lfm2(tmp_path / "model", **settings)))
    assert size is not None and size.intermediate_size == (64 if is_adjusted else 96)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vision_tower_has_the_activations_that_autograd_keeps(family):
    config = deepcopy(VISION_CONFIGS[family])
    config.vision_config.update({"hidden_size": 128, "intermediate_size": 256, "num_heads": 2})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    size = VisionSize.from_config(config.to_dict(), num_parameters=0)
    tower, num_images = get_vision_tower(model), 8
    images = [process(family, bytes([number])) for number in range(num_images)]
    num_kept = count_kept_bytes(model, lambda: tower.encode(images))
    num_tokens = sum(image.num_tokens for image in images)
    estimate = size.estimate_bytes(num_tokens, 2, num_layers=size.num_layers, num_inputs=0)
    assert 0.99 * num_kept <= estimate <= 1.5 * num_kept


@pytest.mark.parametrize("config_class", [Idefics3Config, SmolVLMConfig, Qwen3VLConfig])
def test_a_vision_config_may_leave_out_what_is_the_default(config_class):
    full = config_class().to_dict()
    brief = {"model_type": full["model_type"], "vision_config": {"hidden_size": None}}
    assert VisionSize.from_config(brief, 0) == VisionSize.from_config(full, 0) is not None


def test_an_empty_list_in_a_vision_config_is_not_the_default():
    config = {"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": []}}
    size = VisionSize.from_config(config, 0)
    assert size is not None and size.num_outputs == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_a_vision_tower_are_counted_once(tmp_path, family):
    directory = write_vision_model(tmp_path / "model", family)
    size, shapes = ModelSize.from_name(str(directory)), read_tensor_shapes(directory)
    outer = {name: math.prod(shape) for name, shape in shapes.items() if "embed_tokens" in name or "lm_head" in name}
    assert size is not None and outer and size.num_outer_parameters == sum(outer.values())


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
def test_adapters_are_counted_as_they_are_added(tmp_path, family):
    if family in HYBRIDS:
        HYBRIDS[family](tmp_path / "model")
    else:
        build_model(CONFIGS[family], "eager").save_pretrained(tmp_path / "model")
    model = load_hf_model(tmp_path / "model", load_config(tmp_path / "model"), torch.float32, None)
    add_adapters(model, 3, 1.0, ())
    num_added = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    size = ModelSize.from_name(str(tmp_path / "model"))
    assert size is not None and num_added > 0
    trained = count_trained(TrainerConfig.model_validate({"lora": {"rank": 3}}), size)
    assert num_added <= trained <= 1.1 * num_added  # routers of experts are counted, and have no adapters


def test_images_take_memory_of_trainer_and_engine(tmp_path):
    model = ModelSize.from_name(str(write_vision_model(tmp_path / "model", "qwen3_vl")))
    text = dataclasses.replace(model, vision=None)
    assert model.vision is not None and 0 < model.num_tower_parameters < model.num_parameters

    def estimate(size: ModelSize, **settings) -> MemoryUse:
        return estimate_rank(TrainerConfig.model_validate({"pack_tokens": 1024, **settings}), size, gpu=True)

    trained, frozen, recomputed = (estimate(model, **more) for more in ({}, {"freeze_vision": True}, RECOMPUTED))
    assert trained.activations > recomputed.activations > estimate(text, **RECOMPUTED).activations
    assert trained.activations > frozen.activations > estimate(text).activations
    assert trained.moments - frozen.moments == 8 * model.num_tower_parameters
    assert trained.gradients - frozen.gradients == 4 * model.num_tower_parameters
    lora = {"lora": {"rank": 8}}
    assert estimate(model, **lora).activations - estimate(text, **lora).activations == (
        frozen.activations - estimate(text).activations
    )
    engine = {"num_gpus": 1, "device_memory": 80 << 30}
    small, large = (EngineConfig(image_cache_mib=mib, max_num_batched_tokens=1024) for mib in (1, 1024))
    uses = [estimate_engine(config, 256, size, **engine) for config, size in ((small, text), (small, model))]
    assert uses[1].workspace > uses[0].workspace + (1 << 20)
    assert estimate_engine(large, 256, model, **engine).workspace - uses[1].workspace == 1023 << 20


def test_a_quantized_base_has_its_vision_tower_in_full(tmp_path):
    model = ModelSize.from_name(str(write_vision_model(tmp_path / "model", "idefics3")))
    trainer, text = TrainerConfig.model_validate({"lora": {"rank": 8}}), dataclasses.replace(model, vision=None)
    sizes = [estimate_rank(trainer, size, gpu=True, quantize="8bit").weights for size in (model, text)]
    assert sizes[0] - sizes[1] == pytest.approx(model.num_tower_parameters * (2 - 8.25 / 8), abs=2)
