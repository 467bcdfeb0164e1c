"""Shared by the benchmarks of a training step on a GPU: random traces, and trainers in a given dtype."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ramify.model.pack_layout import PackLayout
from ramify.model.tree_attention import ATTENTION_NAME
from ramify.trace import AnnotatedTrace, Annotation, Message, Trace
from ramify.train import Trainer, TrainerConfig, load_loss
from ramify.train.policy_model import PolicyModel, compile_layers, load_policy

PACK_TOKENS, PATH_TOKENS = 16384, 1024  # of a pack, and of a root-to-leaf path
GROUP_SIZE = 16


class TraceMaker:
    """Builds traces of random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.rng, self.vocab_size, self.names = np.random.default_rng(0), vocab_size, itertools.count()

    def ids(self, size: int) -> np.ndarray:
        return self.rng.integers(0, self.vocab_size, size, dtype=np.int32)

    def reply(self, trace: Trace, parent: int, size: int) -> int:
        trace.graph.add_node(
            parent,
            Message("assistant"),
            self.ids(size),
            sampled_span=(0, size),
            logprobs=np.full(size, -11.0, np.float32),
        )
        return len(trace.nodes) - 1

    def annotate(self, trace: Trace) -> AnnotatedTrace:
        sampled = [index for index, node in enumerate(trace.nodes) if node.message.role == "assistant"]
        return AnnotatedTrace(
            trace, tuple(Annotation(trace.id, node, advantage=float(self.rng.normal())) for node in sampled)
        )

    def chain(self, prompt: np.ndarray, reply: int) -> AnnotatedTrace:
        trace = Trace(id=f"t{next(self.names)}")
        trace.graph.add_node(-1, Message("user"), prompt)
        self.reply(trace, 0, reply)
        return self.annotate(trace)

    def chains(self, count: int, length: int, trained: int) -> list[list[AnnotatedTrace]]:
        return [[self.chain(self.ids(length - trained), trained)] for _ in range(count)]


def make_trainer(model: PreTrainedConfig | Path, pack: int, optim: Any, dtype: torch.dtype = torch.bfloat16) -> Trainer:
    """Build a trainer of a random model with this config, or of the model in a directory."""
    torch.manual_seed(0)
    loss = load_loss("dppo")
    if isinstance(model, Path):
        policy = load_policy(model, loss, device=torch.device("cuda"))
    else:
        with torch.device("cuda"):
            hf_model = AutoModelForCausalLM.from_config(model, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
        policy = PolicyModel(hf_model, PackLayout.FOREST, loss)
    compile_layers(policy)
    settings: Any = {"device": "cuda", "pack_tokens": pack, "optim": optim}
    return Trainer(policy, TrainerConfig(**settings), dtype=dtype)
