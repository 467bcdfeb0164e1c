"""The model that is trained, as one root module: a row in, the loss and what was seen on the way out.

Everything that touches a weight happens inside `Policy.forward`: the layers, the head in chunks, the loss. That is what
sharding needs, which gathers weights when a module is entered and frees them when it is left, and it keeps the one
place that knows the model apart from the many that know steps.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ramify.model.layout import Layout, layout_for
from ramify.model.rewrite import compiler_for
from ramify.model.tree import ATTENTION, windows_of
from ramify.train.head import score
from ramify.train.losses import Loss, ce, ref_kl
from ramify.train.rows import Row


class Seen(NamedTuple):
    """What a row gave: the loss to differentiate, and per entry what is measured, without gradients."""

    loss: Tensor
    terms: dict[str, Tensor]  # component: its part of the loss
    logprob: Tensor  # [entries]
    entropy: Tensor
    masked: Tensor | None  # [rl entries]


class Policy(nn.Module):
    """A causal language model with the losses on top."""

    def __init__(self, model: Any, layout: Layout, rl: Loss) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.windows = windows_of(model.config)
        self.losses: dict[str, Loss] = {"rl": rl, "ce": ce, "ref_kl": ref_kl}
        _without_dropout(model)
        self.train()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: what is compiled, checkpointed and sharded one by one."""
        return self.model.get_decoder().layers

    def forward(self, row: Row, counts: Mapping[str, int]) -> Seen:
        """The row's share of the loss of its batch, whose components have `counts` entries in all."""
        logprob, entropy = self.score(row)
        terms: dict[str, Tensor] = {}
        masked: Tensor | None = None
        for name, weight in row.told.weight.items():
            term = self.losses[name](row.told.entries(name, logprob))
            terms[name] = (weight * term.loss).sum() / counts[name]
            masked = term.masked if name == "rl" else masked
        loss = sum(terms.values(), start=torch.zeros((), device=logprob.device)) if terms else 0.0 * logprob.sum()
        seen = {name: term.detach() for name, term in terms.items()}
        return Seen(loss, seen, logprob.detach(), entropy.detach(), masked)

    def score(self, row: Row) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every entry; of the unused pairs that a row without entries has, where it has none."""
        more = {} if row.tree is None else {"tree": row.tree}
        if more and row.ids.is_cuda:
            _make_room()
        found = self.model.get_decoder()(input_ids=row.ids, position_ids=row.position, use_cache=False, **more)
        told = row.told  # not before the layers were begun
        hidden = found.last_hidden_state.flatten(0, 1).index_select(0, told.source)
        head = self.model.get_output_embeddings()
        logprob, entropy = score(hidden, head.weight, getattr(head, "bias", None), told.token, told.temperature)
        return (logprob[told.pair], entropy[told.pair]) if len(told.pair) else (logprob, entropy)


def load_policy(path: Path, rl: Loss, *, device: torch.device, checkpoint_activations: bool = False) -> Policy:
    """The policy of a Hugging Face directory, in float32; `Masters` gives it the dtype of its computation."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    layout = layout_for(config)
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation=attention_for(layout), local_files_only=True
    )
    policy = Policy(model.to(device), layout, rl)
    if checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), _again())})
    return policy


def attention_for(layout: Layout) -> str | None:
    """The attention a model is loaded with: chains need none of ours, and transformers knows which they can have."""
    return ATTENTION if layout is Layout.FOREST else None


def compile_layers(policy: Policy) -> None:
    """Compile each layer by itself, and the norm behind them; all layers of a kind share the code, one for each length
    of row. Grids of chains have any size, so theirs is one code for all."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    decoder = policy.model.get_decoder()
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    forest = policy.layout is Layout.FOREST
    settings: dict[str, Any] = {"backend": compiler_for(decoder.config), "dynamic": False} if forest else {}
    for module in (*policy.layers, *norms):
        module.compile(**settings)


@contextmanager
def _again() -> Iterator[None]:
    """Around a layer that is computed a second time, in a thread of autograd's."""
    if torch.cuda.is_available():
        _make_room()
    yield


def _make_room() -> None:
    """For the kernels that are launched from here: code compiled by torch 2.13 makes it only where it ran first."""
    from ramify.model.kernels import make_room  # needs Triton, which only a torch for CUDA brings

    make_room()


def _without_dropout(model: nn.Module) -> None:
    """A policy is what was sampled from: it has no noise of its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - of no declared type
