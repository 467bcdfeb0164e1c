"""Models of other kinds than `tiny`: with linear attention, a mixture of experts, and images."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3VLConfig

from ramify.cli import main
from ramify.model.resolve import resolve_model_path
from tests.support import environments
from tests.support.images import QWEN_TOKENS, write_vision_directory
from tests.support.runs import read_values, run_command, run_with_faults

pytestmark = pytest.mark.run

CONFIG = f"""
name = "run"
max_steps = 2
seq_len = 128

[model]
name = "random"

[orchestrator]
batch_size = 8
group_size = 4
max_staleness = 0

[inference]
max_running_requests = 8

[checkpoint]
interval = 1

[[train]]
name = "varied"
taskset = {{ id = "{environments.__file__}:Varied" }}
sampling = {{ temperature = 1.0, max_tokens = 12 }}
max_turns = 1
"""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
FUSED_HYBRID = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
FUSED_HYBRID |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
REPOSITORY = Path(__file__).parents[2]
SQUARES = f"""
[[train]]
name = "squares"
taskset = {{ id = "{environments.__file__}:VariedSquares", partial_credit = true }}
sampling = {{ temperature = 1.0, max_tokens = 24 }}
max_turns = 3
"""
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
needs_full = pytest.mark.full("a run of two steps, continued by a third")


def write_random_model(directory: Path, model_type: str, **settings) -> None:
    """Write a small random model of a type, with the tokenizer of `tiny`."""
    tiny = resolve_model_path("tiny")
    shared = {"vocab_size": 288, "max_position_embeddings": 512, "eos_token_id": 258, "pad_token_id": 256}
    config = AutoConfig.for_model(model_type, **shared, **SIZES, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / name, directory)


def write_random_qwen3_vl(directory: Path) -> None:
    """Write a narrow model with the structure of Qwen3-VL-4B and few layers."""
    write_vision_directory(directory, "qwen3_vl")
    tokens = Tokenizer.from_file(str(directory / "tokenizer.json"))
    start, image, stop = map(tokens.token_to_id, QWEN_TOKENS)
    text = {"vocab_size": tokens.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 2048}
    text |= {"eos_token_id": 258, "pad_token_id": 256, "tie_word_embeddings": True, "rope_parameters": ROPE}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
    ids = {
        "image_token_id": image,
        "video_token_id": image,
        "vision_start_token_id": start,
        "vision_end_token_id": stop,
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    shutil.copy(resolve_model_path("tiny") / "generation_config.json", directory)


def run_random_model(home: Path, model_type: str, **settings) -> str:
    """Train a random model for two steps; return what the trainer has logged."""
    write_random_model(home / "random", model_type, **settings)
    (home / "rl.toml").write_text(CONFIG)
    result = run_command("rl", "@", "rl.toml", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    run = home / "outputs" / "run"
    assert read_values(run, "train/skipped") == [0.0, 0.0]
    assert all(norm > 0 for norm in read_values(run, "train/grad_norm"))
    divergences = read_values(run, "mismatch_kl")
    assert len(divergences) == 2 and max(divergences) < 1e-8  # with the weights of the step, also after an update
    assert len(read_values(run, "time/step")) == 1  # since the step before
    assert not read_values(run, "train/mfu") and not read_values(run, "utilization")  # the peaks of a CPU are unknown
    return next(run.rglob("trainer*.log")).read_text()


@pytest.mark.timeout(600)
@needs_full
def test_hybrid_model_is_trained_on_forests(tmp_path):
    log = run_random_model(tmp_path, "qwen3_next", **LINEAR)
    assert "the states of linear_attention layers fork where it does" in log
    assert read_values(tmp_path / "outputs" / "run", "forest/chain_cost") == [1.0, 1.0]
    check_weights(tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.full("a run with four kills")
def test_fused_hybrid_survives_kills_with_states_in_flight(tmp_path):
    """Snapshots of states end with an engine; every token that is trained is the engine's and the trainer's alike."""
    write_random_model(tmp_path / "random", "qwen3_5_text", **FUSED_HYBRID)
    (tmp_path / "rl.toml").write_text(CONFIG)  # a random model has different rewards in it
    flags = ["--max_steps", "6", "--launch.max_restarts", "100"]
    run_with_faults(tmp_path, ["serve", "trainer", "serve", "orchestrator"], *flags, timeout=600.0)
    assert (tmp_path / "faults.txt").read_text().split() == ["serve", "trainer", "serve", "orchestrator"]
    run = tmp_path / "outputs" / "run"
    assert main(["why", str(run), "--audit"]) == 0
    assert max(read_values(run, "mismatch_kl")) < 1e-8
    assert "operators: torch (recurrent layers)" in (run / "logs" / "inference-0.log").read_text()


@pytest.mark.timeout(2400)
@pytest.mark.full("minutes of supervised and reinforcement learning")
def test_tiny_hybrid_learns_to_reverse_text(tmp_path):
    model, build = tmp_path / "tiny-hybrid", [sys.executable, "-m", "tools.tiny", "build", "--model", "tiny-hybrid"]
    subprocess.run([*build, "-o", str(model)], cwd=REPOSITORY, check=True, timeout=1200)
    assert sum(file.stat().st_size for file in model.iterdir()) < 3_000_000
    flags = ["--name", "run", "-m", str(model), "--trainer.optim.lr", "3e-4"]
    example = str(REPOSITORY / "examples/reverse_text/rl.toml")
    result = run_command("rl", "@", example, *flags, cwd=tmp_path, timeout=900.0)
    assert result.returncode == 0, result.stdout + result.stderr
    evals = read_values(tmp_path / "outputs" / "run", "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.2


@pytest.mark.timeout(600)
@needs_full
def test_mixture_of_experts_says_that_routers_are_not_replayed(tmp_path):
    log = run_random_model(tmp_path, "qwen3_moe")
    assert "experts: 2 of 4 process a token; router replay is not implemented" in log
    assert len(re.findall(r"step=\d .* mismatch_kl=\d", log)) == 2
    check_weights(tmp_path)


@pytest.mark.timeout(600)
@needs_full
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2"])
def test_attention_sinks_and_soft_caps_are_trained_and_sampled_alike(tmp_path, model_type):
    log = run_random_model(tmp_path, model_type, sliding_window=8, initializer_range=0.1)
    assert "forest: shared prefixes are computed once" in log
    check_weights(tmp_path)


@pytest.mark.timeout(600)
@needs_full
def test_qwen3_vl_trains_on_every_rollout_of_color_codeword(tmp_path):
    write_random_qwen3_vl(tmp_path / "random")
    config, _, _ = CONFIG.replace("seq_len = 128", "seq_len = 1536").partition("[[train]]")
    (tmp_path / "rl.toml").write_text(config + SQUARES)
    result = run_command("rl", "@", "rl.toml", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "outputs" / "run"
    assert read_values(run, "train/skipped") == [0.0, 0.0]
    assert read_values(run, "trainable") == [1.0, 1.0] and read_values(run, "rollouts") == [8.0, 8.0]
    assert min(read_values(run, "forest/images")) > 1
    assert all(norm > 0 for norm in read_values(run, "train/grad_norm"))
    assert max(read_values(run, "mismatch_kl")) < 1e-8


def check_weights(home: Path) -> None:
    """The run goes on from its checkpoint with the same weights, which transformers and the engine can load."""
    result = run_command("rl", "@", "rl.toml", "--max-steps", "3", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    divergences = read_values(home / "outputs" / "run", "mismatch_kl")
    assert len(divergences) == 3 and max(divergences) < 1e-8
