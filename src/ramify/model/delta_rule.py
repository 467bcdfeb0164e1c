"""The gated delta rule and gated linear attention over a forest, in PyTorch.

A head has a state S, a matrix [key_dim, value_dim], that a token with key k, value v, decay a and strength b changes to
a·S + k·(b·(v − a·Sᵀk))ᵀ; the token's output is Sᵀq. Within a chunk of tokens this is a triangular system, so a chunk
needs a few matrix products and the state before it. Gated linear attention adds v as it is, a·S + k·vᵀ, and has no
such system. Several chunks may continue the same state or repeat a token, and autograd adds their gradients.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.model.forest_chunks import ForestChunks


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBatch:
    """The chunks of a pack, sorted by the number of chunks above them. A token may be in several of them."""

    token_index: Tensor  # [chunks, size] the token at each place; the number of tokens where there is none
    output_place: Tensor  # [tokens] the place in the flattened `token_index` that has the output of each token
    bounds: list[int]  # [depths + 1] the first chunk of each depth
    parents: list[Tensor]  # for each depth below the first, the chunks before, counted from the first of their depth

    @classmethod
    def from_chunks(cls, chunks: ForestChunks) -> "ChunkBatch":
        """Sort chunks by depth."""
        depths = chunks.compute_depths()
        order = np.argsort(depths, kind="stable")
        rank = np.argsort(order)
        bounds = np.searchsorted(depths[order], np.arange(depths.max(initial=-1) + 2))
        size = int((chunks.stop - chunks.start).max(initial=1))
        rows = chunks.start[order][:, None] + np.arange(size)
        is_row = rows < chunks.stop[order][:, None]
        place = np.empty(len(chunks.rows), np.int64)
        place[rows[is_row]] = np.flatnonzero(is_row)
        rows_by_token, first = chunks.group_rows()
        num_tokens = len(first) - 1
        tokens = np.append(chunks.rows, num_tokens)[np.where(is_row, rows, -1)]
        before = rank[chunks.previous[order]]
        parents = [before[a:b] - bounds[d] for d, (a, b) in enumerate(pairwise(bounds[1:].tolist()))]
        return cls(
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(place[rows_by_token[first[:-1]]]),
            bounds.tolist(),
            [torch.from_numpy(array.astype(np.int64)) for array in parents],
        )


def _gated_delta_rule(
    query: Tensor,  # [tokens, key_heads, key_dim]; of length 1 for the delta rule
    key: Tensor,  # the same
    value: Tensor,  # [tokens, heads, value_dim]; heads is a multiple of key_heads
    log_decay: Tensor,  # [tokens, heads]
    strength: Tensor | None,  # [tokens, heads]; None for gated linear attention
    chunks: ChunkBatch,
    scale: float | None = None,
) -> Tensor:
    """Return the output of each token, [tokens, heads, value_dim]. Queries are scaled, by default by 1/√key_dim.

    The computation is in float32, or in float64 if the values are.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    repeats = value.shape[1] // key.shape[1]

    def to_chunks(tensor: Tensor) -> Tensor:  # [chunks, heads, size, ...]
        padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]).to(dtype)
        rows = padded.index_select(0, chunks.token_index.flatten()).unflatten(0, chunks.token_index.shape)
        return rows.transpose(1, 2)

    q, k = (to_chunks(tensor).repeat_interleave(repeats, 1) for tensor in (query, key))
    q, v = q * (query.shape[-1] ** -0.5 if scale is None else scale), to_chunks(value)
    decay = to_chunks(log_decay).cumsum(-1)
    future = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    pair_decay = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(future, -torch.inf).exp()
    total_decay = decay.exp().unsqueeze(-1)
    new_values, state_keys = v, None
    if strength is not None:
        b = to_chunks(strength).unsqueeze(-1)
        system = (b * k) @ k.mT * pair_decay
        right_side = torch.cat([b * v, b * k * total_decay], -1)
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        new_values, state_keys = solution.split([v.shape[-1], k.shape[-1]], -1)
    last_keys = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    states, values = _pass_states(new_values, state_keys, last_keys, total_decay[..., -1:, :], chunks)
    out = q * total_decay @ states + (q @ k.mT * pair_decay) @ values
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.output_place).to(value.dtype)


gated_delta_rule: Any = torch.compiler.disable(_gated_delta_rule)


def _pass_states(
    new_values: Tensor, state_keys: Tensor | None, last_keys: Tensor, chunk_decay: Tensor, chunks: ChunkBatch
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, and the values that its tokens add."""
    states: list[Tensor] = []
    values: list[Tensor] = []
    after = new_values.new_zeros(0)
    for depth, (start, stop) in enumerate(pairwise(chunks.bounds)):
        shape = (stop - start, new_values.shape[1], last_keys.shape[-1], new_values.shape[-1])
        state = after.index_select(0, chunks.parents[depth - 1]) if depth else new_values.new_zeros(shape)
        added = new_values[start:stop]
        if state_keys is not None:
            added = added - state_keys[start:stop] @ state
        after = chunk_decay[start:stop] * state + last_keys[start:stop].mT @ added
        states.append(state)
        values.append(added)
    return torch.cat(states), torch.cat(values)
