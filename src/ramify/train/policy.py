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
from ramify.train.head import score
from ramify.train.losses import Loss, ce, ref_kl
from ramify.train.rows import Row, row_of


class Seen(NamedTuple):
    """What a row gave: the loss to differentiate, and per entry what is measured, without gradients."""

    loss: Tensor
    terms: dict[str, Tensor]  # component: its part of the loss
    logprob: Tensor  # [entries]
    entropy: Tensor
    masked: Tensor | None  # [rl entries]


class Policy(nn.Module):
    """A causal language model with the losses on top."""

    def __init__(self, model: Any, layout: PackLayout, rl: Loss) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.windows = get_sliding_windows(model.config)
        self.longest = get_longrope_limit(model.config.get_text_config())
        self.losses: dict[str, Loss] = {"rl": rl, "ce": ce, "ref_kl": ref_kl}
        self.train()
        _without_noise(model)

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
        if self.longest is not None and row.forest.position_ids.max(initial=0) >= self.longest:
            said = f"longrope turns all tokens of a row by other angles where one stands at {self.longest} or beyond"
            raise ModelUnsupported(f"{said}; lower seq_len")
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
    """The policy of a Hugging Face directory, in float32; `Masters` gives it the dtype of its computation.

    Raises ModelUnsupported if the policy does not compute what the model itself does. The check runs on the CPU, where
    every model is loaded first: before sharding, and without kernels that training in another dtype would never use.
    """
    config = load_config(path)
    layout = choose_pack_layout(config)
    logging.disable_progress_bar()
    model = load_hf_model(path, config, torch.float32, attention_for(layout))
    policy = Policy(model, layout, rl)
    _check_agreement(policy)
    policy.to(device)
    if checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), _again())})
    return policy


@torch.no_grad()
def _check_agreement(policy: Policy) -> None:
    """Raise ModelUnsupported unless a policy on the CPU scores a few tokens as the model itself does."""
    model = policy.model
    ids = build_check_ids(model.config)
    expected = compute_reference_logprobs(model, ids, attention_for(policy.layout))
    try:
        actual, _ = policy.score(row_of(_chain(ids), layout=policy.layout, windows=policy.windows))
    except (RamifyError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that is put together in another way fails anywhere
        raise unsupported_error("trainer", model, error) from error
    check_logprobs("trainer", model, expected, actual)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelUnsupported(f"{type(model).__name__} has no list of layers, which the trainer compiles and shards")


def _chain(ids: Tensor) -> Forest:
    """Return a forest of one path, in which every token but the first is trained."""
    trace = Trace(id="trial")
    first, *rest = ids.tolist()
    prompt = trace.add_node(-1, Message("user", ""), [first])
    called = {"sampled": (0, len(rest)), "logprobs": [0.0] * len(rest), "call": ModelCall("trial")}
    reply = trace.add_node(prompt, Message("assistant", ""), rest, **called)
    return build_forest([AnnotatedTrace(trace, (Annotation("trial", reply, advantage=1.0),))])


def attention_for(layout: PackLayout) -> str | None:
    """The attention a model is loaded with: chains need none of ours, and transformers knows which they can have."""
    return ATTENTION_NAME if layout is PackLayout.FOREST else None


def compile_layers(policy: Policy) -> None:
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
def _again() -> Iterator[None]:
    """Around a layer that is computed a second time, in a thread of autograd's."""
    if torch.cuda.is_available():
        _make_room()
    yield


def _make_room() -> None:
    """For the kernels that are launched from here: code compiled by torch 2.13 makes it only where it ran first."""
    from ramify.model.kernels import set_triton_allocator  # needs Triton, which only a torch for CUDA brings

    set_triton_allocator()


def _without_noise(model: nn.Module) -> None:
    """A policy is what was sampled from: it drops nothing, and no router guesses. Only what may be computed again by
    layers is told that it trains, or nothing would be."""
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
