"""Tiny random models with linear-attention layers and experts, for tests of the engine."""

from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.infer.llama import POSITIONS, VOCAB


def write_qwen3_next(directory: Path, seed: int = 0, **settings) -> Path:
    """Write a model whose weights are exact in bfloat16: linear attention, then full attention with experts."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mlp_only_layers": [0],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    Qwen3NextForCausalLM(Qwen3NextConfig(**defaults | settings)).bfloat16().float().save_pretrained(directory)
    return directory
