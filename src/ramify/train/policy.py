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
from transformers.utils import logging

from ramify.errors import ModelUnsupported, RamifyError
from ramify.model.graph_rewrites import build_compile_backend
from ramify.model.load import load_config, load_hf_model
from ramify.model.logprob_check import build_check_ids, check_logprobs, compute_reference_logprobs, unsupported_error
from ramify.model.pack_layout import PackLayout, choose_pack_layout, get_longrope_limit
from ramify.model.tree_attention import ATTENTION_NAME, get_sliding_windows
from ramify.trace import AnnotatedTrace, Annotation, Forest, Message, ModelCall, Trace, build_forest
from ramify.train.lm_head import compute_logprobs
from ramify.train.losses import LossFunction, ce, ref_kl
from ramify.train.model_inputs import ModelInputs, build_model_inputs


class PolicyOutput(NamedTuple):
    """What a row gave: the loss to differentiate, and per entry what is measured, without gradients."""

    loss: Tensor
    component_losses: dict[str, Tensor]  # component: its part of the loss
    logprob: Tensor  # [entries]
    entropy: Tensor
    masked: Tensor | None  # [rl entries]


class PolicyModel(nn.Module):
    """A causal language model with the losses on top."""

    def __init__(self, model: Any, layout: PackLayout, rl_loss: LossFunction) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.sliding_windows = get_sliding_windows(model.config)
        self.max_positions = get_longrope_limit(model.config.get_text_config())
        self.losses: dict[str, LossFunction] = {"rl": rl_loss, "ce": ce, "ref_kl": ref_kl}
        self.train()
        _disable_dropout(model)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: what is compiled, checkpointed and sharded one by one."""
        return self.model.get_decoder().layers

    def forward(self, inputs: ModelInputs, entry_counts: Mapping[str, int]) -> PolicyOutput:
        """The row's share of the loss of its batch, whose components have `counts` entries in all."""
        logprob, entropy = self.compute_logprobs(inputs)
        terms: dict[str, Tensor] = {}
        masked: Tensor | None = None
        for name, weight in inputs.head_inputs.component_weights.items():
            term = self.losses[name](inputs.head_inputs.select_entries(name, logprob))
            terms[name] = (weight * term.loss).sum() / entry_counts[name]
            masked = term.masked if name == "rl" else masked
        loss = sum(terms.values(), start=torch.zeros((), device=logprob.device)) if terms else 0.0 * logprob.sum()
        seen = {name: term.detach() for name, term in terms.items()}
        return PolicyOutput(loss, seen, logprob.detach(), entropy.detach(), masked)

    def compute_logprobs(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every entry; of the unused pairs that a row without entries has, where it has none."""
        if self.max_positions is not None and inputs.forest.position_ids.max(initial=0) >= self.max_positions:
            said = (
                f"longrope turns all tokens of a row by other angles where one stands at {self.max_positions} or beyond"
            )
            raise ModelUnsupported(f"{said}; lower seq_len")
        more = {} if inputs.tree_mask is None else {"tree_mask": inputs.tree_mask}
        if more and inputs.input_ids.is_cuda:
            _set_triton_allocator()
        found = self.model.get_decoder()(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **more
        )
        told = inputs.head_inputs  # not before the layers were begun
        hidden = found.last_hidden_state.flatten(0, 1).index_select(0, told.hidden_index)
        head = self.model.get_output_embeddings()
        logprob, entropy = compute_logprobs(
            hidden, head.weight, getattr(head, "bias", None), told.target_ids, told.temperature
        )
        return (logprob[told.pair_index], entropy[told.pair_index]) if len(told.pair_index) else (logprob, entropy)


def load_policy(
    path: Path, rl_loss: LossFunction, *, device: torch.device, checkpoint_activations: bool = False
) -> PolicyModel:
    """The policy of a Hugging Face directory, in float32; `Masters` gives it the dtype of its computation.

    Raises ModelUnsupported if the policy does not compute what the model itself does. The check runs on the CPU, where
    every model is loaded first: before sharding, and without kernels that training in another dtype would never use.
    """
    config = load_config(path)
    layout = choose_pack_layout(config)
    logging.disable_progress_bar()
    model = load_hf_model(path, config, torch.float32, get_attention_name(layout))
    policy = PolicyModel(model, layout, rl_loss)
    _check_agreement(policy)
    policy.to(device)
    if checkpoint_activations:
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _recompute_context())}
        )
    return policy


@torch.no_grad()
def _check_agreement(policy: PolicyModel) -> None:
    """Raise ModelUnsupported unless a policy on the CPU scores a few tokens as the model itself does."""
    model = policy.model
    ids = build_check_ids(model.config)
    expected = compute_reference_logprobs(model, ids, get_attention_name(policy.layout))
    try:
        actual, _ = policy.compute_logprobs(
            build_model_inputs(_build_chain(ids), layout=policy.layout, sliding_windows=policy.sliding_windows)
        )
    except (RamifyError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that is put together in another way fails anywhere
        raise unsupported_error("trainer", model, error) from error
    check_logprobs("trainer", model, expected, actual)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelUnsupported(f"{type(model).__name__} has no list of layers, which the trainer compiles and shards")


def _build_chain(ids: Tensor) -> Forest:
    """Return a forest of one path, in which every token but the first is trained."""
    trace = Trace(id="trial")
    first, *rest = ids.tolist()
    prompt = trace.add_node(-1, Message("user", ""), [first])
    called = {"sampled": (0, len(rest)), "logprobs": [0.0] * len(rest), "call": ModelCall("trial")}
    reply = trace.add_node(prompt, Message("assistant", ""), rest, **called)
    return build_forest([AnnotatedTrace(trace, (Annotation("trial", reply, advantage=1.0),))])


def get_attention_name(layout: PackLayout) -> str | None:
    """The attention a model is loaded with: chains need none of ours, and transformers knows which they can have."""
    return ATTENTION_NAME if layout is PackLayout.FOREST else None


def compile_layers(policy: PolicyModel) -> None:
    """Compile each layer by itself, and the norm behind them; all layers of a kind share the code, one for each length
    of row. Grids of chains have any size, so theirs is one code for all."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    decoder = policy.model.get_decoder()
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    forest = policy.layout is PackLayout.FOREST
    settings: dict[str, Any] = {"backend": build_compile_backend(decoder.config), "dynamic": False} if forest else {}
    for module in (*policy.layers, *norms):
        module.compile(**settings)


@contextmanager
def _recompute_context() -> Iterator[None]:
    """Around a layer that is computed a second time, in a thread of autograd's."""
    if torch.cuda.is_available():
        _set_triton_allocator()
    yield


def _set_triton_allocator() -> None:
    """For the kernels that are launched from here: code compiled by torch 2.13 makes it only where it ran first."""
    from ramify.model.cuda.tree_attention import (
        set_triton_allocator,  # needs Triton, which only a torch for CUDA brings
    )

    set_triton_allocator()


def _disable_dropout(model: nn.Module) -> None:
    """A policy is what was sampled from: it drops nothing, and no router guesses. Only what may be computed again by
    layers is told that it trains, or nothing would be."""
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
