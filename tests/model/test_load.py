"""What the engine cannot hold or compute is refused by name, before anybody asks it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ramify.errors import ModelUnsupported, RamifyError, WeightsRefused
from ramify.infer.request import SamplingParams
from ramify.model.load import load_model
from tests.infer.llama import build_core, reference, run, scores, write_llama

SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128, "head_dim": 8, "rotary_dim": 4}
SMALL |= {"pad_token_id": 0, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "ffn_dim": 48}


def write(kind: str, directory: Path, **settings) -> Path:
    """A small random model of a type."""
    known = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{key: to for key, to in SMALL.items() if hasattr(known, key)}, **settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gemma4", "head_dim"),
        ("gemma4_text", "head_dim"),
        ("deepseek_v3", "latent"),
        ("mamba2", "mamba"),
        ("bloom", "max_position_embeddings"),
    ],
)
def test_a_model_without_a_paged_cache_is_named(kind, named, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=named):
        load_model(tmp_path)


def test_layers_share_one_number_of_keys_and_values(tmp_path):
    LlamaConfig(per_layer_config={1: {"num_key_value_heads": 8}}).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="num_key_value_heads"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("codegen", "computes attention by itself"),
        ("gptj", "computes attention by itself"),
        ("xglm", "computes attention by itself"),
        ("doge", "a mask of its own"),
        ("bert", "looks ahead"),
        ("diffllama", "attends twice"),
        ("jetmoe", "heads that its config does not tell"),
        ("gemma2", "softcap"),
    ],
)
def test_a_model_that_the_paged_attention_would_compute_wrongly_is_named_at_the_start(kind, named, tmp_path):
    with pytest.raises(ModelUnsupported, match=named):
        build_core(write(kind, tmp_path))


@pytest.mark.parametrize("kind", ["afmoe", "phi3", "opt"])
def test_a_model_of_another_family_runs_its_own_code(kind, tmp_path):
    core = build_core(write(kind, tmp_path), max_batch_tokens=16)
    asked = [
        core.create_request([5, 6, 7 + number] * 5, SamplingParams(max_tokens=5, seed=number)) for number in range(3)
    ]
    for request in run(core, *asked):
        plain = scores(reference(tmp_path), request.token_ids, 1.0)
        expected = [plain[15 + number - 1, token].item() for number, token in enumerate(request.output_token_ids)]
        assert request.logprobs == pytest.approx(expected, abs=1e-4)


def test_where_angles_depend_on_the_length_of_a_sequence_it_stays_below_that_length(tmp_path):
    """Else a long request beside a short one would turn the tokens of both, and a cache holds what was turned."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0]}
    core = build_core(write("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=40))
    assert core.max_model_len == 40


def _without_a_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _of_another_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (_without_a_tensor, WeightsRefused, "lacks 1 tensors of its model .model.layers.1.mlp.up_proj.weight"),
        (_of_another_shape, WeightsRefused, "cannot be read"),
        (_cut_short, WeightsRefused, "cannot be read"),
        (lambda directory: (directory / "model.safetensors").unlink(), WeightsRefused, "no file named model"),
        (lambda directory: (directory / "config.json").write_text("{"), ModelUnsupported, "not a valid JSON"),
        (lambda directory: (directory / "config.json").write_text("{}"), ModelUnsupported, "model_type"),
        (lambda directory: AutoConfig.for_model("clip").save_pretrained(directory), RamifyError, "CLIP|clip"),
    ],
)
def test_a_directory_that_is_no_whole_model_is_refused_by_name(damage, name, said, tmp_path):
    damage(write_llama(tmp_path))
    with pytest.raises(name, match=said):
        load_model(tmp_path)
