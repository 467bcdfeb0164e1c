"""The trained model as one root module: from model inputs to the loss and the metrics of each entry.

Everything that reads a weight happens inside `PolicyModel.forward`: the layers, the chunked head, the loss. FSDP needs
that, because it gathers weights when a module is entered and frees them when it is left. It also keeps knowledge of the
model in one place.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ramify.core.errors import EngineIncompatible, ModelUnsupported, RamifyError
from ramify.model.device_memory import is_out_of_memory
from ramify.model.graph_rewrites import build_compile_backend, compile_module
from ramify.model.load import load_config, load_hf_model
from ramify.model.logprob_check import build_check_ids, check_logprobs, compute_reference_logprobs, unsupported_error
from ramify.model.lora import disable_adapters
from ramify.model.pack_layout import PackLayout, choose_pack_layout, get_longrope_limit
from ramify.model.recurrent_layers import add_forest_layers
from ramify.model.resolve import fetch_config, fetch_model
from ramify.model.tree_attention import ATTENTION_NAME, read_attention_settings
from ramify.model.vision import build_image_inputs, get_vision_tower
from ramify.trace import AnnotatedTrace, Annotation, Forest, Message, ModelCall, Trace, build_forest, concat_forests
from ramify.trace.forest import START_LOGPROB
from ramify.train import recompute
from ramify.train.batch import START_REFERENCE_COUNT, pack_forests
from ramify.train.lm_head import compute_logprobs, read_logit_transform
from ramify.train.losses import Entries, LossFunction, ce, dppo, kl, ref_kl
from ramify.train.model_inputs import ModelInputs, build_model_inputs


class PolicyOutput(NamedTuple):
    """The result of one pack: the loss to differentiate, and values of each entry without gradients."""

    loss: Tensor
    component_losses: dict[str, Tensor]  # component: its part of the loss
    logprob: Tensor  # [entries]
    entropy: Tensor  # [entries]
    masked: Tensor | None  # [rl entries]


class PolicyModel(nn.Module):
    """A causal language model with its losses.

    Attributes:
        model: the transformers model.
        layout: how its packs are laid out, as trees or as chains.
        has_recurrence: whether it has recurrent layers that read forests.
        attention: what the masks of its packs depend on.
        logit_transform: the scale and the soft cap of its logits.
        max_positions: the number of positions it supports, where longrope limits it.
        losses: the loss function of each component.
        tower: the vision tower; None for a text model.
    """

    def __init__(self, model: Any, layout: PackLayout, rl_loss: LossFunction) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.has_recurrence = layout is PackLayout.FOREST and add_forest_layers(model) > 0
        self.tower = get_vision_tower(model)
        self.attention = read_attention_settings(model.config)
        self.logit_transform = read_logit_transform(model.config.get_text_config())
        self.max_positions = get_longrope_limit(model.config.get_text_config())
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.losses: dict[str, LossFunction] = {"rl": rl_loss, "ce": ce, "ref_kl": ref_kl, "kl": kl}
        self.train()
        _disable_dropout(model)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, which are compiled, recomputed and sharded one by one."""
        return self.model.get_decoder().layers

    def forward(self, inputs: ModelInputs, entry_counts: Mapping[str, int]) -> PolicyOutput:
        """Compute the pack's share of the loss of its batch, which has `entry_counts` entries of each component."""
        if entry_counts.get(START_REFERENCE_COUNT):  # in every pack: ranks run the same collectives
            self._add_start_logprobs(inputs)
        logprob, entropy, top_logprob = self._run_model(inputs)
        losses: dict[str, Tensor] = {}
        masked: Tensor | None = None
        for component, weights in inputs.head_inputs.component_weights.items():
            term = self.losses[component](inputs.head_inputs.select_entries(component, logprob, top_logprob))
            losses[component] = (weights * term.loss).sum() / entry_counts[component]
            masked = term.masked if component == "rl" else masked
        loss = sum(losses.values(), start=torch.zeros((), device=logprob.device)) if losses else 0.0 * logprob.sum()
        component_losses = {name: value.detach() for name, value in losses.items()}
        return PolicyOutput(loss, component_losses, logprob.detach(), entropy.detach(), masked)

    @torch.no_grad()
    def _add_start_logprobs(self, inputs: ModelInputs) -> None:
        """Fill in missing reference logprobs, computed by the model without its adapters."""
        with disable_adapters(self.model):
            logprob, _ = self.compute_logprobs(inputs)
        head_inputs = inputs.head_inputs
        reference = head_inputs.all_entries.reference_logprob
        if len(reference):
            reference = reference.where(reference != START_LOGPROB, logprob)
            head_inputs.all_entries = replace(head_inputs.all_entries, reference_logprob=reference)

    def compute_entries(self, forest: Forest) -> Entries:
        """Return the entries of a forest that the policy gradient trains, for a loss that is written by hand.

        The forest is computed as one pack; `pack_forests` divides one that does not fit into memory. Raises
        ModelUnsupported for a forest with images, and ValueError for a forest without entries.
        """
        if not len(forest.targets):
            raise ValueError("the forest has no entries: it needs traces with annotations that are not over `seq_len`")
        (pack,) = pack_forests([forest], sys.maxsize, self.layout)
        device = next(self.parameters()).device
        inputs = build_model_inputs(pack, layout=self.layout, device=device, attention=self.attention)
        return inputs.head_inputs.select_entries("rl", self.compute_logprobs(inputs)[0])

    def compute_logprobs(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the logprob and the entropy of every entry; for a pack without entries, of its padding pairs."""
        return self._run_model(inputs)[:2]

    def _run_model(self, inputs: ModelInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprob, entropy, and the logprobs of the reference's likeliest tokens [entries, k]."""
        if (token_id := int(inputs.forest.token_ids.max(initial=0))) >= self.vocab_size:
            raise EngineIncompatible(
                f"a batch holds token id {token_id}, but the vocabulary of the model is 0 to {self.vocab_size - 1}; "
                "use the tokenizer and the weights of one model"
            )
        limit = self.max_positions
        if limit is not None and (position := inputs.forest.position_ids.max(initial=0)) >= limit:
            problem = f"position {position} exceeds the longrope limit of {limit}"
            reason = "beyond it all angles change, which packs cannot represent"
            raise ModelUnsupported(f"{problem}: {reason}; lower seq_len")
        tree_kwargs: dict[str, Any] = {} if inputs.tree_mask is None else {"tree_mask": inputs.tree_mask}
        if self.has_recurrence:
            tree_kwargs["seq_idx"] = inputs.recurrence
        if tree_kwargs and inputs.input_ids.is_cuda:
            recompute.set_triton_allocator()
        token_kwargs: dict[str, Any] = {"input_ids": inputs.input_ids}
        if (images := inputs.images) is not None:
            token_kwargs = build_image_inputs(self.model, inputs.input_ids, images.rows, images.features)
        decoder = self.model.get_decoder()
        decoder_output = decoder(**token_kwargs, position_ids=inputs.position_ids, use_cache=False, **tree_kwargs)
        head_inputs = inputs.head_inputs  # built here, while the device runs the layers
        hidden = decoder_output.last_hidden_state.flatten(0, 1).index_select(0, head_inputs.hidden_index)
        head = self.model.get_output_embeddings()
        logprob, entropy, top_logprob = compute_logprobs(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            head_inputs.target_ids,
            head_inputs.temperature,
            head_inputs.top_ids,
            self.logit_transform,
        )
        pair_index = head_inputs.pair_index
        if not len(pair_index):
            return logprob, entropy, top_logprob
        # The backward pass of `index_select` adds; the backward pass of `[]` sorts the indices first.
        logprob, entropy = logprob.index_select(0, pair_index), entropy.index_select(0, pair_index)
        return logprob, entropy, top_logprob.index_select(0, pair_index)


def load_policy(
    model: str | Path,
    rl_loss: LossFunction = dppo,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    recompute_layers: int = 0,
    keep_precision: bool = False,
) -> PolicyModel:
    """Load a model to train.

    `model` is a packaged model, a directory, or a Hugging Face id; `rl_loss` is what `forward` computes for entries of
    the policy gradient; `device` is by default a GPU if there is one; the model computes in `dtype`;
    the backward pass recomputes the activations of the first `recompute_layers` layers, which saves memory. With
    `keep_precision`, tensors that `dtype` would round keep their stored dtype: `MasterWeights` takes them one by one.

    Raises ModelUnsupported if the policy does not compute what the model itself does. The check runs on the CPU in
    float32, where every model is loaded first: before sharding, and without kernels that training in another dtype
    would never use.
    """
    config = load_config(model if isinstance(model, Path) else fetch_config(model))
    layout = choose_pack_layout(config)  # raises before weights are downloaded or read
    path = model if isinstance(model, Path) else fetch_model(model)
    module = load_hf_model(path, config, dtype, get_attention_name(layout), keep_precision=keep_precision)
    policy = PolicyModel(module, layout, rl_loss)
    with _compute_in_float32(policy):
        _check_agreement(policy)
    policy.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    recompute.recompute_layers(policy.model, recompute_layers)
    return policy


@contextmanager
def _compute_in_float32(policy: PolicyModel) -> Iterator[None]:
    """Run the block with float32 weights, without a copy of all of them: layers are converted one at a time."""
    layers: Any = getattr(policy.model.get_decoder(), "layers", ())
    layer_values = {value for layer in layers for value in (*layer.parameters(), *layer.buffers())}
    outer_values = [value for value in (*policy.parameters(), *policy.buffers()) if value not in layer_values]
    stored: dict[Tensor, Tensor] = {}

    def convert(values: Iterable[Tensor]) -> None:
        for value in values:
            if value.is_floating_point() and value.dtype != torch.float32:
                stored[value] = value.data
                value.data = value.data.float()

    def restore(values: Iterable[Tensor]) -> None:
        for value in values:
            if value in stored:
                value.data = stored.pop(value)

    def before_layer(layer: nn.Module, _: Any) -> None:
        convert((*layer.parameters(), *layer.buffers()))

    def after_layer(layer: nn.Module, *_: Any) -> None:
        restore((*layer.parameters(), *layer.buffers()))

    convert(outer_values)
    handles = [layer.register_forward_pre_hook(before_layer) for layer in layers]
    handles += [layer.register_forward_hook(after_layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore(list(stored))


@torch.no_grad()
def _check_agreement(policy: PolicyModel) -> None:
    """Raise ModelUnsupported unless a policy on the CPU scores a few tokens as the model itself does.

    They are two trees of a pack, because a layer that ignores how the pack is laid out gets the first one right.
    """
    model = policy.model
    ids = build_check_ids(model.config)
    expected = compute_reference_logprobs(model, ids, get_attention_name(policy.layout))
    try:
        pack = concat_forests([build_chain(ids) for _ in range(2)])
        inputs = build_model_inputs(pack, layout=policy.layout, attention=policy.attention)
        actual, _ = policy.compute_logprobs(inputs)
    except RamifyError:
        raise
    except Exception as error:  # an unusual model may fail anywhere
        if is_out_of_memory(error):
            raise
        raise unsupported_error("trainer", model, error) from error
    for logprobs in actual.chunk(2):
        check_logprobs("trainer", model, expected, logprobs)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise ModelUnsupported(f"{type(model).__name__} has no list of layers, which the trainer compiles and shards")


def build_chain(ids: Tensor) -> Forest:
    """Return a forest of one path, in which every token but the first is trained."""
    trace = Trace(id="trial")
    first, *sampled = ids.tolist()
    prompt = trace.graph.add_node(-1, Message("user", ""), [first])
    call = {"sampled_span": (0, len(sampled)), "logprobs": [0.0] * len(sampled), "call": ModelCall("trial")}
    reply = trace.graph.add_node(prompt, Message("assistant", ""), sampled, **call)
    return build_forest([AnnotatedTrace(trace, (Annotation("trial", reply, advantage=1.0),))])


def get_attention_name(layout: PackLayout) -> str | None:
    """Return the attention implementation to load a model with; None is transformers' choice, which suits chains."""
    return ATTENTION_NAME if layout is PackLayout.FOREST else None


def compile_layers(policy: PolicyModel) -> None:
    """Compile each layer, and the norm behind them, once for all lengths. Layers of one kind share the code."""
    decoder = policy.model.get_decoder()
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    backend = build_compile_backend(decoder.config) if policy.layout is PackLayout.FOREST else "inductor"
    for module in (*policy.layers, *norms):
        compile_module(module, backend)


def _disable_dropout(model: nn.Module) -> None:
    """Disable dropout and router noise, because the policy must match the one that sampled.

    Modules that can be recomputed keep `training = True`, because transformers recomputes only layers in training mode.
    """
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
