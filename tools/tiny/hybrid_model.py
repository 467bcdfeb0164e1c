"""`tiny-hybrid`: a small Qwen3.5, with the gated delta rule in every other layer, that reverses text with slips.

It does not ship: a test builds it and trains it by reinforcement learning. Tokens are bytes, as in `tiny`.
"""

import asyncio
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ramify.env.tasksets import reversal
from ramify.infer.client import ClientSampling
from ramify.model.render import load_renderer
from tools.tiny.corpus import CorpusMix, build_reversal_prompt, draw_conversations
from tools.tiny.local_model import open_local_model
from tools.tiny.stages import SftStage
from tools.tiny.tokenizer import IM_END, MAX_POSITIONS, PAD, VOCAB_SIZE, build_tokenizer
from tools.tiny.weights import write_model

HYBRID_RECIPE_VERSION = 1  # raised whenever the same seed gives another model
NUM_PROMPTS = 128
REVERSALS = CorpusMix(
    reversal=8, reversal_drill=24, tool_use=0, walk=0, sorting=0, guessing=0, arithmetic=0, drill=0, slip_prob=0.0
)
SLIPS = CorpusMix(reversal=1, tool_use=0, walk=0, sorting=0, guessing=0, arithmetic=0, drill=0, slip_prob=0.5)
HYBRID_STAGES = [
    SftStage("reversals", lambda seed: draw_conversations(seed, REVERSALS), 400, 16, decay=False),
    SftStage("slips", lambda seed: draw_conversations(seed + 1, SLIPS), 60, 10),
]


def build_hybrid_config() -> Any:
    """Build the config, of 0.8 million parameters in four layers."""
    tokenizer = build_tokenizer()
    return AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="bfloat16",
    )


def write_initial_hybrid_model(directory: Path, seed: int) -> None:
    """Write a complete model directory with random weights."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    write_model(AutoModelForCausalLM.from_config(build_hybrid_config()).float(), directory)


def write_bfloat16_hybrid_model(trained_directory: Path, directory: Path) -> None:
    """Write a trained model, rounded to bfloat16."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(trained_directory, dtype=torch.bfloat16, local_files_only=True)
    write_model(model, directory)


def measure_hybrid_model(directory: Path, seed: int) -> dict[str, float]:
    """Return how well a model directory reverses held-out texts; `seed` is not used."""
    config = reversal.ReversalTextsConfig(split="eval", num_tasks=NUM_PROMPTS)
    texts, renderer = list(reversal.generate_texts(config)), load_renderer(directory)
    prompts = [renderer.render(build_reversal_prompt(text).messages) for text in texts]
    with open_local_model(directory) as model:
        sampling = [ClientSampling(max_tokens=2 * config.max_chars + 40, temperature=value) for value in (1.0, 0.0)]
        sampled, greedy = (
            [parsed.message.text for parsed in asyncio.run(model.sample_replies(prompts, params))]
            for params in sampling
        )
    answers = [reversal.reverse(text) for text in texts]
    figures = {
        "well_formed": fmean(map(reversal.is_well_formed, sampled)),
        "similarity": fmean(map(reversal.score_similarity, sampled, answers)),
        "greedy_similarity": fmean(map(reversal.score_similarity, greedy, answers)),
    }
    return {name: round(value, 4) for name, value in figures.items()}
