"""The recurrent layers of one step, in plain PyTorch: states are read from slots and written back.

A layer with the gated delta rule has two states per sequence: the last inputs of a convolution, and for each head a
matrix S [key_dim, value_dim]. A token with key k, value v, decay a and strength b changes it to
a·S + k·(b·(v - a·Sᵀk))ᵀ, and its output is Sᵀq. The sequences of a tile are one batch. Padding has strength 0 and
decay 1, so that it changes no state. A layer with a gated short convolution has only the last inputs as its state.

On CUDA (`ramify.model.kernels.cuda.recurrent_ops`) a sequence with many rows is computed in chunks, which
`ramify.model.kernels.chunk_plan` lists on the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.kernels.chunk_plan import CHUNK_SIZE
from ramify.model.kernels.paged_attention import AttentionTile
from ramify.model.kernels.state_pool import StatePool

KEY_NORM_EPS = 1e-6  # of the norms of queries and keys, as in transformers


@dataclass(frozen=True, slots=True)
class DeltaRuleWeights:
    """The tensors between the two projections of a layer with the gated delta rule, and its sizes.

    The first projection has the columns [queries, keys, values, gates, strengths, step sizes]; the convolution mixes
    the first three.
    """

    conv: Tensor  # [channels, width]
    log_rate: Tensor  # [heads]
    step_bias: Tensor  # [heads]
    norm: Tensor  # [value_dim]
    key_heads: int
    key_dim: int

    @property
    def heads(self) -> int:
        """The number of states, and of values."""
        return len(self.log_rate)

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return len(self.norm)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The number of columns of the first projection for the convolution, gates, strengths and step sizes."""
        return len(self.conv), self.heads * self.value_dim, self.heads, self.heads


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """The tensors between the two projections of a layer with a gated short convolution.

    The first projection has the columns [input gates, output gates, inputs], as many of each as there are channels.
    """

    conv: Tensor  # [channels, width]
    bias: Tensor | None  # [channels]


RecurrentWeights = DeltaRuleWeights | ShortConvWeights


def compute_recurrent_layer(
    weights: RecurrentWeights, projected: Tensor, tile: AttentionTile, states: StatePool, layer: int, eps: float
) -> Tensor:
    """Return what the second projection of a recurrent layer gets for a tile's rows; the states are changed.

    `projected` is what the first projection returns; `eps` is added in norms.
    """
    if isinstance(weights, ShortConvWeights):
        return compute_short_conv(weights, projected, tile, states, layer)
    values = compute_delta_rule(weights, projected, tile, states, layer)
    gates = projected.split(weights.widths, -1)[1].unflatten(1, values.shape[1:])
    gated = F.rms_norm(values, weights.norm.shape, weights.norm.float(), eps) * F.silu(gates.float())
    return gated.flatten(1).to(projected.dtype)


def compute_short_conv(
    weights: ShortConvWeights, projected: Tensor, tile: AttentionTile, states: StatePool, layer: int
) -> Tensor:
    """Return the gated convolution of a tile's gated inputs, [rows, channels]; the states are changed."""
    gate_in, gate_out, inputs = _split_sequences(projected, tile).chunk(3, -1)
    mixed = _convolve(weights.conv, gate_in * inputs, states.get_tensor(layer, "conv"), tile)
    if weights.bias is not None:
        mixed += weights.bias
    output = (gate_out * mixed).to(projected.dtype).flatten(0, 1)
    return output if tile.unpad_index is None else output.index_select(0, tile.unpad_index)


def compute_delta_rule(
    weights: DeltaRuleWeights, projected: Tensor, tile: AttentionTile, states: StatePool, layer: int
) -> Tensor:
    """Return the outputs of a tile's rows in float32, [rows, heads, value_dim]; the states are changed."""
    slots = tile.state_slots
    assert slots is not None
    is_token = None
    if tile.lengths is not None:
        place = torch.arange(tile.queries_per_sequence, device=projected.device)
        is_token = (place < tile.lengths.unsqueeze(1)).unsqueeze(-1)
    rows = _split_sequences(projected, tile)
    inputs, _, strength, step_size = rows.split(weights.widths, -1)
    mixed = F.silu(_convolve(weights.conv, inputs, states.get_tensor(layer, "conv"), tile))
    key_width = weights.key_heads * weights.key_dim
    queries_and_keys, value = mixed.split([2 * key_width, weights.heads * weights.value_dim], -1)
    heads = normalize_heads(queries_and_keys.unflatten(-1, (2, weights.key_heads, weights.key_dim)))
    if weights.heads > weights.key_heads:
        heads = heads.repeat_interleave(weights.heads // weights.key_heads, 3)
    query, key = heads.unbind(2)
    log_decay = -weights.log_rate.float().exp() * F.softplus(step_size.float() + weights.step_bias.float())
    strength = strength.float().sigmoid()
    if is_token is not None:
        log_decay, strength = log_decay * is_token, strength * is_token
    matrices = states.get_tensor(layer, "recurrent")
    state = matrices.index_select(0, slots)
    value = value.unflatten(-1, (weights.heads, -1))
    outputs: list[Tensor] = []
    compute = _step if rows.shape[1] == 1 else _compute_chunk
    for start in range(0, rows.shape[1], CHUNK_SIZE):
        q, k, v, a, b = (
            part[:, start : start + CHUNK_SIZE].transpose(1, 2) for part in (query, key, value, log_decay, strength)
        )
        output, state = compute(q, k, v, a, b, state)
        outputs.append(output)
    matrices.index_copy_(0, slots, state.to(matrices.dtype))
    output = torch.cat(outputs, 2).transpose(1, 2).flatten(0, 1)
    return output if tile.unpad_index is None else output.index_select(0, tile.unpad_index)


def _split_sequences(projected: Tensor, tile: AttentionTile) -> Tensor:
    """Return a tile's rows as [sequences, tokens, columns], with padding."""
    if tile.pad_index is not None:
        projected = projected.index_select(0, tile.pad_index)
    return projected.unflatten(0, (tile.num_sequences, tile.queries_per_sequence))


def _convolve(conv: Tensor, inputs: Tensor, windows: Tensor, tile: AttentionTile) -> Tensor:
    """Return the convolution of [sequences, tokens, channels] in float32, and update the inputs in `windows`."""
    slots, lengths = tile.state_slots, tile.lengths
    assert slots is not None
    width, num_tokens = windows.shape[-1], inputs.shape[1]
    history = torch.cat([windows.index_select(0, slots).mT, inputs], 1)  # the oldest input is not read
    wide, taps = history.float(), conv.float()
    mixed = wide[:, 1 : 1 + num_tokens] * taps[:, 0]
    for tap in range(1, width):
        mixed.addcmul_(wide[:, 1 + tap : 1 + tap + num_tokens], taps[:, tap])
    if lengths is None:
        last = history[:, num_tokens:]
    else:
        index = lengths.unsqueeze(1) + torch.arange(width, device=lengths.device)
        last = history.gather(1, index.unsqueeze(-1).expand(-1, -1, history.shape[-1]))
    windows.index_copy_(0, slots, last.mT)
    return mixed


def normalize_heads(heads: Tensor) -> Tensor:
    """Return vectors of length 1, computed in float32."""
    wide = heads.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_NORM_EPS)).to(heads.dtype)


def _step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of one token of each sequence, and the state after it; the shapes are `_compute_chunk`'s."""
    decayed = state * log_decay.exp().unsqueeze(-1)
    added = strength.unsqueeze(-1) * (value - key @ decayed)
    state = decayed.addcmul_(key.mT, added)
    return query @ state * key.shape[-1] ** -0.5, state


def _compute_chunk(
    query: Tensor,  # [sequences, heads, tokens, key_dim]
    key: Tensor,
    value: Tensor,  # [sequences, heads, tokens, value_dim]
    log_decay: Tensor,  # [sequences, heads, tokens]
    strength: Tensor,
    state: Tensor,  # [sequences, heads, key_dim, value_dim]
) -> tuple[Tensor, Tensor]:
    """Return the outputs of some tokens, and the state after them.

    The values that the tokens add to the state depend on each other: they solve a triangular system.
    """
    decay = log_decay.cumsum(-1)
    later = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    pair_decay = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    total_decay, strength = decay.exp().unsqueeze(-1), strength.unsqueeze(-1)
    system = (strength * key) @ key.mT * pair_decay
    expected = key @ state * total_decay
    added = torch.linalg.solve_triangular(system, strength * (value - expected), upper=False, unitriangular=True)
    output = query @ state * total_decay + (query @ key.mT * pair_decay) @ added
    last_keys = key * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    return output * key.shape[-1] ** -0.5, total_decay[..., -1:, :] * state + last_keys.mT @ added
