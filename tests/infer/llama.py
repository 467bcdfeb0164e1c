"""Tiny random Llamas for tests of the engine."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import EngineRequest
from ramify.model.load import load_model
from ramify.model.precision import disable_tf32_convolutions
from ramify.model.weights import get_untied_tensors, publish_weights
from ramify.trace.version import PolicyVersion

torch.set_num_threads(1)  # tests run in parallel, and small matrices gain nothing from a second thread
disable_tf32_convolutions()  # as the process of an engine does
logging.disable_progress_bar()

DEVICE = os.environ.get("RAMIFY_TEST_DEVICE", "cpu")  # the same tests on a GPU: cuda
DTYPE = os.environ.get("RAMIFY_TEST_DTYPE", "float32")  # the logprob property in bfloat16
VOCAB = 96
POSITIONS = 256


def write_llama(
    directory: Path, seed: int = 0, positions: int = POSITIONS, head_dim: int = 8, vocab: int = VOCAB
) -> Path:
    """Write a model whose weights are exact in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).bfloat16().float().save_pretrained(directory)
    return directory


def reference(directory: Path, dtype: str = "float32"):
    """Load the model for transformers' own forward."""
    torch_dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype, attn_implementation="eager").eval()


def publish_as(directory: Path, source: Path, version: PolicyVersion) -> Path:
    """Publish the weights of the model in `source` as a version."""
    return publish_weights(directory, get_untied_tensors(reference(source)), version, base_model=source)


def build_core(directory: Path, version: PolicyVersion = PolicyVersion("llama"), **settings) -> EngineCore:  # noqa: B008
    defaults = {
        "device": DEVICE,
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_running_requests": 16,
    }
    config = {**defaults, **settings}
    model = load_model(directory, dtype=config["dtype"], device=config["device"])
    return EngineCore(model, EngineConfig(**config), version)


def run(core: EngineCore, *requests: EngineRequest) -> list[EngineRequest]:
    """Run requests to their end."""
    for request in requests:
        core.enqueue(request)
    while core.has_unfinished_requests:
        core.step()
    return list(requests)


def sampled_ids(request: EngineRequest) -> list[int]:
    return request.token_ids[len(request.prompt_token_ids) :]


@torch.no_grad()
def scores(model, tokens: list[int], temperature: float) -> torch.Tensor:
    """Return log softmax(logits / T) at every position, by transformers' own forward."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0] / (temperature or 1.0), -1)
