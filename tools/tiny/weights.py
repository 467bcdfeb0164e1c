"""Writing `tiny` before its training, in float32, and after it, rounded to bfloat16."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.utils import logging

from tools.tiny.induction_heads import init_induction_heads
from tools.tiny.tokenizer import build_model_config, write_tokenizer


def write_initial_model(directory: Path, seed: int) -> None:
    """Write a complete model directory with initial weights."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(build_model_config()).float()
    init_induction_heads(model, seed)
    write_model(model, directory)


def write_bfloat16_model(trained_directory: Path, directory: Path) -> None:
    """Write a trained model as it ships."""
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(trained_directory, dtype=torch.bfloat16, local_files_only=True)
    write_model(model, directory)


def write_model(model: Any, directory: Path) -> None:
    """Write a model directory with its tokenizer."""
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # transformers makes weights readable only for their owner
