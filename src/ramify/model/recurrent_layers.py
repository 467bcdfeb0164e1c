"""Layers of transformers with a recurrent state or a convolution, over forests.

`add_forest_layers` makes such layers of a model instances of a subclass of their class. Parameters, their names and
submodules stay; only `forward` differs, and only if it gets `seq_idx`, the argument by which models tell these layers
which tokens belong together: here a `ForestRecurrence`. Without it a layer runs its own code.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers.activations import ACT2FN

from ramify.core.errors import ModelUnsupported
from ramify.model.forest_recurrence import ForestRecurrence, measure_kernel_error
from ramify.model.kernels.recurrent_ops import KEY_NORM_EPS, normalize_heads

MAX_KERNEL_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


class ForestLayer:
    """The part of a layer's class that reads forests."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        """Return the output of each token, [1, tokens, width]."""
        if not isinstance(seq_idx, ForestRecurrence):
            own_kwargs = kwargs if seq_idx is None else {**kwargs, "seq_idx": seq_idx}
            return super().forward(hidden_states, *args, **own_kwargs)  # pyrefly: ignore[missing-attribute]
        return self.forward_forest(hidden_states.squeeze(0), seq_idx).unsqueeze(0)


class ForestDeltaNet(ForestLayer):
    """A gated delta net: projections, a convolution, the gated delta rule, a gated norm."""

    has_correction = True

    def get_state_sizes(self: Any) -> tuple[int, int, int, int]:
        """Return the number of heads of keys and of values, and their widths."""
        return self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim

    def forward_forest(self: Any, rows: Tensor, recurrence: ForestRecurrence) -> Tensor:
        """Return the output of each token, [tokens, width]."""
        mixed, gate, strength, step_size = self.project(rows)
        mixed = recurrence.convolve(mixed, self.conv1d.weight, self.conv1d.bias)
        query, key, value = self.activate_heads(mixed, recurrence.uses_kernels)
        log_decay = -self.A_log.float().exp() * F.softplus(step_size.float() + self.dt_bias)
        out = recurrence.gated_delta_rule(query, key, value, log_decay, strength)
        return self.merge_heads(out.flatten(0, 1), gate.reshape(-1, self.head_v_dim), len(rows))

    def activate_heads(self: Any, mixed: Tensor, uses_kernels: bool) -> Sequence[Tensor]:
        """Return queries, keys and values, [tokens, heads, width]; queries and keys have length 1."""
        if uses_kernels and self.activation == "silu":
            from ramify.model.kernels.cuda.activate_heads import activate_heads_op  # needs Triton

            sizes = self.num_k_heads, self.head_k_dim, self.head_v_dim
            return activate_heads_op(mixed.contiguous(), *sizes, KEY_NORM_EPS)
        columns = ACT2FN[self.activation](mixed).split([self.key_dim, self.key_dim, self.value_dim], -1)
        query, key = (normalize_heads(part.unflatten(1, (-1, self.head_k_dim))) for part in columns[:2])
        return query, key, columns[2].unflatten(1, (-1, self.head_v_dim))

    def merge_heads(self: Any, out: Tensor, gate: Tensor, num_tokens: int) -> Tensor:
        """Apply the gated norm and the output projection."""
        return self.out_proj(self.norm(out, gate).view(num_tokens, -1))


class ForestQwen3NextDeltaNet(ForestDeltaNet):
    """The gated delta net of Qwen3-Next, whose projections are grouped by key head."""

    def project(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values in one row, gates, strengths and step sizes."""
        projected = self.in_proj_qkvz(rows[None]), self.in_proj_ba(rows[None])
        query, key, value, gate, b, a = self.fix_query_key_value_ordering(*projected)
        mixed = torch.cat([part.squeeze(0).flatten(1) for part in (query, key, value)], -1)
        return mixed, gate, b.squeeze(0).sigmoid(), a.squeeze(0)


class ForestQwen35DeltaNet(ForestDeltaNet):
    """The gated delta net of Qwen3.5, with a projection for each part."""

    def project(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values in one row, gates, strengths and step sizes."""
        return self.in_proj_qkv(rows), self.in_proj_z(rows), self.in_proj_b(rows).sigmoid(), self.in_proj_a(rows)


class ForestOlmoDeltaNet(ForestDeltaNet):
    """The gated delta net of OLMo Hybrid, whose strengths may go up to 2."""

    def project(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values in one row, gates, strengths and step sizes."""
        mixed = torch.cat([self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)], -1)
        strength = self.b_proj(rows).sigmoid() * (2.0 if self.allow_neg_eigval else 1.0)
        return mixed, self.g_proj(rows), strength, self.a_proj(rows)

    def merge_heads(self: Any, out: Tensor, gate: Tensor, num_tokens: int) -> Tensor:
        """Apply the gated norm and the output projection."""
        return self.o_proj(self.o_norm(out, gate).view(num_tokens, -1))


class ForestMamba2(ForestLayer):
    """A Mamba-2 layer: a projection, a convolution, gated linear attention, a skip, a gated norm.

    Its C are queries, its B keys, and its inputs times their step sizes values. A group of heads shares B and C.
    """

    has_correction = False

    def get_state_sizes(self: Any) -> tuple[int, int, int, int]:
        """Return the number of heads of keys and of values, and their widths."""
        return self.n_groups, self.num_heads, self.ssm_state_size, self.head_dim

    def forward_forest(self: Any, rows: Tensor, recurrence: ForestRecurrence) -> Tensor:
        """Return the output of each token, [tokens, width]."""
        widths = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, mixed, step_size = self.project(rows).split(widths, -1)
        mixed = self.act(recurrence.convolve(mixed, self.conv1d.weight, self.conv1d.bias))
        group_width = self.n_groups * self.ssm_state_size
        inputs, key, query = mixed.split([self.intermediate_size, group_width, group_width], -1)
        key, query = (part.unflatten(1, (self.n_groups, -1)) for part in (key, query))
        inputs = inputs.unflatten(1, (self.num_heads, -1)).float()
        step_size = F.softplus(step_size.float() + self.dt_bias.float()).clamp(*self.time_step_limit)
        value = (inputs * step_size.unsqueeze(-1)).to(rows.dtype)
        out = recurrence.gated_delta_rule(query, key, value, -self.A_log.float().exp() * step_size, None, scale=1.0)
        out = out.float() + inputs * self.D.float().unsqueeze(-1)
        return self.out_proj(self.apply_gate(out.flatten(1), gate).to(rows.dtype))

    def project(self: Any, rows: Tensor) -> Tensor:
        """Return gates, the inputs of the convolution, and step sizes in one row."""
        return self.in_proj(rows)

    def apply_gate(self: Any, out: Tensor, gate: Tensor) -> Tensor:
        """Apply the gated norm."""
        return self.norm(out, gate)


class ForestFalconH1(ForestMamba2):
    """The Mamba-2 layer of Falcon-H1, with multipliers, and a gate that may have no norm."""

    def project(self: Any, rows: Tensor) -> Tensor:
        """Return gates, the inputs of the convolution, and step sizes in one row."""
        return self.in_proj(rows * self.ssm_in_multiplier) * self.mup_vector.squeeze(0)

    def apply_gate(self: Any, out: Tensor, gate: Tensor) -> Tensor:
        """Apply the gated norm, or the gate."""
        return self.norm(out, gate) if self.mamba_rms_norm else out * F.silu(gate)


class ForestShortConv(ForestLayer):
    """The gated short convolution of LFM2."""

    def forward_forest(self: Any, rows: Tensor, recurrence: ForestRecurrence) -> Tensor:
        """Return the output of each token, [tokens, width]."""
        gate_in, gate_out, values = self.in_proj(rows).chunk(3, -1)
        return self.out_proj(gate_out * recurrence.convolve(gate_in * values, self.conv.weight, self.conv.bias))


FOREST_LAYERS: dict[str, type[ForestLayer]] = {
    "Qwen3NextGatedDeltaNet": ForestQwen3NextDeltaNet,
    "Qwen3_5GatedDeltaNet": ForestQwen35DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": ForestQwen35DeltaNet,
    "OlmoHybridGatedDeltaNet": ForestOlmoDeltaNet,
    "GraniteMoeHybridMambaLayer": ForestMamba2,
    "BambaMixer": ForestMamba2,
    "NemotronHMamba2Mixer": ForestMamba2,
    "FalconH1Mixer": ForestFalconH1,
    "Lfm2ShortConv": ForestShortConv,
    "Lfm2MoeShortConv": ForestShortConv,
}


def add_forest_layers(model: nn.Module) -> int:
    """Let the recurrent layers of a model read forests; returns their number."""
    layers = [module for module in model.modules() if type(module).__name__ in FOREST_LAYERS]
    for layer in layers:
        layer.__class__ = _derive_class(type(layer))
    return len(layers)


@cache
def _derive_class(own_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class for forests of layers of a class. There is only one: compiled code is made for a class."""
    return type(f"Forest{own_class.__name__}", (FOREST_LAYERS[own_class.__name__], own_class), {})


def count_state_products(model: nn.Module) -> int:
    """Return how many elements of states all recurrent layers together multiply by vectors, per token.

    The gated delta rule multiplies a state by three vectors, gated linear attention by two.
    """
    layers = (module for module in model.modules() if isinstance(module, ForestDeltaNet | ForestMamba2))
    return sum((2 + layer.has_correction) * math.prod(layer.get_state_sizes()[1:]) for layer in layers)


def check_kernels(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelUnsupported if the kernels of a GPU compute the model's recurrent states wrongly in a dtype.

    The check of logprobs when a model is loaded runs on the CPU and does not see kernels.
    """
    layer = next((module for module in model.modules() if isinstance(module, ForestDeltaNet | ForestMamba2)), None)
    if layer is None:
        return
    error = measure_kernel_error(*layer.get_state_sizes(), dtype, device, has_correction=layer.has_correction)
    if not error <= MAX_KERNEL_ERRORS[dtype]:  # rejects NaN too
        rule = "the gated delta rule" if layer.has_correction else "gated linear attention"
        problem = f"the kernels of {rule} are wrong by {error:.2g} in {dtype}"
        raise ModelUnsupported(f"{problem} on {torch.cuda.get_device_name(device)}; try another version of Triton")
