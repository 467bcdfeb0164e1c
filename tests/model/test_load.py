"""Models that the engine cannot hold or compute are rejected when they are loaded."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig
from transformers.utils.logging import warning_once

from ramify.core.errors import ModelUnsupported, RamifyError, WeightsRefused
from ramify.infer.request import SamplingParams
from ramify.model.fused_model import FusedModel
from ramify.model.load import load_config, load_engine_model, load_hf_model
from ramify.model.resolve import resolve_model_path
from ramify.train.memory import ModelSize
from tests.support.models import (
    FUSED,
    LINEAR,
    MAMBA2,
    build_core,
    reference,
    run,
    sampled_ids,
    scores,
    write_llama,
    write_random_model,
)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gemma4", "head_dim"),
        ("gemma4_text", "head_dim"),
        ("deepseek_v3", "latent"),
        ("mamba2", "mamba"),
        ("bloom", "max_position_embeddings"),
    ],
)
def test_unsupported_cache_is_rejected(model_type, message, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=message):
        load_engine_model(tmp_path)


def test_layers_with_different_kv_heads_are_rejected(tmp_path):
    LlamaConfig(per_layer_config={1: {"num_key_value_heads": 8}}).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="num_key_value_heads"):
        load_engine_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("codegen", "does not (support custom|call its) attention function"),
        ("gptj", "does not (support custom|call its) attention function"),
        ("xglm", "does not (support custom|call its) attention function"),
        ("doge", "builds its own attention mask"),
        ("bert", "attends to later tokens"),
        ("diffllama", "computes attention twice"),
        ("jetmoe", "heads that differ from its config"),
    ],
)
def test_unsupported_attention_is_rejected(model_type, message, tmp_path):
    with pytest.raises(ModelUnsupported, match=message):
        build_core(write_random_model(model_type, tmp_path))


OWN_CODE: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "opt": {},
    "gpt_oss": {"initializer_range": 0.3, "sliding_window": 9},
    "gemma2": {"initializer_range": 0.3, "sliding_window": 9, "attn_logit_softcapping": 1.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA2},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "olmo_hybrid": LINEAR,
}


@pytest.mark.parametrize("model_type", OWN_CODE | FUSED)
def test_models_have_the_logprobs_of_transformers(model_type, tmp_path):
    """Those without a fused forward run their own code."""
    settings = (OWN_CODE | FUSED)[model_type]
    core = build_core(write_random_model(model_type, tmp_path, **settings), max_num_batched_tokens=16)
    assert (core.runner.fused_model is not None) == (model_type in FUSED)
    requests = [
        core.create_request([5, 6, 7 + index] * 5, SamplingParams(max_tokens=5, seed=index)) for index in range(3)
    ]
    model = reference(tmp_path)
    for request in run(core, *requests):
        logprobs = scores(model, request.token_ids, 1.0)
        expected = [logprobs[15 + index - 1, token].item() for index, token in enumerate(sampled_ids(request))]
        assert request.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_layer_without_a_known_projection_is_rejected_by_name(tmp_path):
    module: Any = load_engine_model(write_llama(tmp_path), dtype="float32", device="cpu").module
    del module.model.layers[1].mlp.down_proj
    with pytest.raises(ModelUnsupported, match="LlamaMLP has none of down_proj, w2"):
        FusedModel(module)


def test_longrope_limits_the_context_length(tmp_path):
    """Beyond the limit the angles of cached tokens and of other requests in the batch would change."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0]}
    core = build_core(write_random_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=40))
    assert core.max_model_len == 40


def _remove_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _change_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_remove_tensor, WeightsRefused, "lacks 1 tensors of its model .model.layers.1.mlp.up_proj.weight"),
        (_change_shape, WeightsRefused, "cannot be read"),
        (_truncate, WeightsRefused, "cannot be read"),
        (lambda directory: (directory / "model.safetensors").unlink(), WeightsRefused, "no file named model"),
        (lambda directory: (directory / "config.json").write_text("{"), ModelUnsupported, "not a valid JSON"),
        (lambda directory: (directory / "config.json").write_text("{}"), ModelUnsupported, "model_type"),
        (lambda directory: AutoConfig.for_model("clip").save_pretrained(directory), RamifyError, "CLIP|clip"),
    ],
)
def test_damaged_model_directory_is_rejected(damage, error, message, tmp_path):
    damage(write_llama(tmp_path))
    with pytest.raises(error, match=message):
        load_engine_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}'])
def test_damaged_index_of_stored_values_is_rejected(content, tmp_path):
    weights = write_llama(tmp_path) / "model.safetensors"
    weights.with_name("model.safetensors.index.json").write_text(content)
    weights.unlink()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        load_hf_model(tmp_path, load_config(tmp_path), torch.bfloat16, None, keep_precision=True)


def test_config_of_an_idefics3_model_is_loaded_without_a_warning(caplog):
    warning_once.cache_clear()
    load_config(resolve_model_path("tiny-vision"))
    assert caplog.messages == []
    message = "pad_token_id must be within the vocabulary (between 0 and 287), got 300"  # of a model's own config
    logger = logging.getLogger("transformers.configuration_utils")
    logger.warning(message)
    assert caplog.messages == [message]
    assert logger.filters == []


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 10},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
    ],
    ids=str,
)
def test_impossible_sizes_are_rejected_by_name(values, tmp_path):
    tiny = resolve_model_path("tiny")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    (tmp_path / "model.safetensors").symlink_to(tiny / "model.safetensors")
    with pytest.raises((ModelUnsupported, WeightsRefused)):
        load_engine_model(tmp_path)
    ModelSize.from_name(str(tmp_path))  # the plan of a run estimates it, or leaves it out


def test_config_that_is_nested_too_deeply_is_rejected_by_name(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelUnsupported, match=r"config\.json: RecursionError"):
        load_config(tmp_path)
    assert ModelSize.from_name(str(tmp_path)) is None
