"""Tree attention on a CPU, in PyTorch: products of ranges of queries with only the keys that they see.

A pack consists of *runs*, sequences of tokens without forks. Inside a long run attention is plain causal attention, and
all descendants of a run see the whole run: one dense product without a mask. Short runs are collected into tiles, for
which a small mask says which query sees which key. Partial results of a query are merged by their log-sum-exp, forward
and backward, so memory is linear in the tokens and no [query, key] mask of the pack ever exists. A pack of chains costs
as much as a batch of them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.model.kernels.cpu.capped_attention import capped_backward, capped_forward
from ramify.trace.columns import Int32Array

MIN_OWN_RUN = 32  # a run of at least this length is not put into a tile
MIN_SHARED_RUN = 128  # the descendants of a run of at least this length see it in one product
TILE_QUERIES = 128  # largest tile
KeyIndex = slice | Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class PartialAttention(NamedTuple):
    """The attention of queries [start, stop) to some keys.

    Every query sees itself in exactly one partial attention, for which `is_first` is set and which comes first.
    """

    start: int
    stop: int
    keys: KeyIndex
    mask: Tensor | None = None  # [queries, keys], 0 or -inf
    causal: bool = False
    is_first: bool = False


def split_attention(end: Int32Array, position: Int32Array, window: int) -> list[PartialAttention]:
    """Return the partial attentions of a pack; `window` is 0 if attention has none."""
    bounds = find_run_bounds(end)
    shared_runs = [] if window else [(a, b) for a, b in pairwise(bounds) if b - a >= MIN_SHARED_RUN and end[a] > b]
    in_shared_run = np.zeros(len(end), bool)  # these keys have partial attentions of their own
    for start, stop in shared_runs:
        in_shared_run[start:stop] = True
    parts: list[PartialAttention] = []
    for start, stop, is_run in _iter_query_ranges(bounds, TILE_QUERIES if window else None):
        visible = (end[:start] > start) & ~in_shared_run[:start]
        visible_to_all = end[:start] >= stop
        if window:
            visible &= position[:start] > position[start:stop].min() - window
            visible_to_all &= position[:start] > position[start:stop].max() - window
        masked_keys, common_keys = np.flatnonzero(visible & ~visible_to_all), np.flatnonzero(visible & visible_to_all)
        own_keys = np.concatenate([masked_keys, np.arange(start, stop)])
        causal = is_run and not len(masked_keys) and (not window or stop - start <= window)
        mask = None if causal else _build_visibility_mask(end, position, window, np.arange(start, stop), own_keys)
        parts.append(PartialAttention(start, stop, _as_key_index(own_keys), mask, causal, is_first=True))
        if len(common_keys):
            parts.append(PartialAttention(start, stop, _as_key_index(common_keys)))
    return parts + [PartialAttention(stop, int(end[start]), slice(start, stop)) for start, stop in shared_runs]


def find_run_bounds(end: Int32Array) -> list[int]:
    """Return where each run begins, and the end of the last."""
    forks = (end[1:] != end[:-1]) | (end[:-1] == np.arange(1, len(end)))
    return [0, *(np.flatnonzero(forks) + 1).tolist(), len(end)]


def _iter_query_ranges(bounds: list[int], max_length: int | None) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, whether it is one run): long runs in pieces of `max_length`, short ones in tiles."""
    tile: tuple[int, int, bool] | None = None
    for start, stop in pairwise(bounds):
        if tile and (stop - start >= MIN_OWN_RUN or stop - tile[0] > TILE_QUERIES):
            yield tile
            tile = None
        if stop - start >= MIN_OWN_RUN:
            size = max_length or stop - start
            yield from ((piece, min(piece + size, stop), True) for piece in range(start, stop, size))
        elif stop > start:
            tile = (tile[0], stop, False) if tile else (start, stop, True)
    if tile:
        yield tile


def _build_visibility_mask(
    end: Int32Array, position: Int32Array, window: int, queries: np.ndarray, keys: np.ndarray
) -> Tensor:
    visible = (keys[None, :] <= queries[:, None]) & (queries[:, None] < end[keys][None, :])
    if window:
        visible &= position[queries][:, None] - position[keys][None, :] < window
    return torch.zeros(visible.shape).masked_fill_(~torch.from_numpy(visible), float("-inf"))


def _as_key_index(index: np.ndarray) -> KeyIndex:
    """Return contiguous keys as a slice, so that indexing copies nothing."""
    if index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


class CpuTreeAttention(torch.autograd.Function):
    """Tree attention of [1, heads, tokens, head_dim] queries; keys and values may have fewer heads.

    `sinks` [heads] are the scores of a key with the value 0, which every query of a head sees.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: list[PartialAttention],
        scale: float | None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention over all parts, and save what `backward` needs."""
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        for part in parts:
            rows = slice(part.start, part.stop)
            key_value = key[:, :, part.keys], value[:, :, part.keys]
            part_out, part_lse = _attend_part(query[:, :, rows], *key_value, part, scale, softcap)
            if not part.is_first:
                old_lse, new_lse = lse[:, :, rows], torch.logaddexp(lse[:, :, rows], part_lse)
                part_out = part_out * (part_lse - new_lse).exp_().unsqueeze(-1)
                part_out += out[:, :, rows] * (old_lse - new_lse).exp_().unsqueeze(-1)
                part_lse = new_lse
            out[:, :, rows], lse[:, :, rows] = part_out, part_lse
        if sinks is not None:
            total_lse = torch.logaddexp(lse, sinks.float()[:, None])
            out *= (lse - total_lse).exp_().unsqueeze(-1)
            lse = total_lse
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.parts, ctx.scale, ctx.softcap = parts, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key, value and sinks."""
        query, key, value, out, lse, sinks = ctx.saved_tensors
        d_query, d_key, d_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value))
        for part in ctx.parts:
            rows = slice(part.start, part.stop)
            part_grad, part_query, part_out, part_lse = (tensor[:, :, rows] for tensor in (grads[0], query, out, lse))
            saved = part_query, key[:, :, part.keys], value[:, :, part.keys], part_out, part_lse
            part_grads = _differentiate_part(part_grad, *saved, part, ctx.scale, ctx.softcap)
            d_query[:, :, rows] += part_grads[0]
            _accumulate(d_key, part.keys, part_grads[1])
            _accumulate(d_value, part.keys, part_grads[2])
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[6]:
            delta = (grads[0].float() * out.float()).sum(-1)
            d_sinks = -((sinks.float()[:, None] - lse).exp_() * delta).sum((0, 2)).to(sinks.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, d_sinks


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, part: PartialAttention, scale: float | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a partial attention."""
    if softcap:
        return capped_forward(query, key, value, part.causal, part.mask, scale or query.shape[-1] ** -0.5, softcap)
    return _forward(query, key, value, 0.0, part.causal, attn_mask=_cast_mask(part.mask, query), scale=scale)


def _differentiate_part(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    part: PartialAttention,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from a partial attention."""
    tensors = grad, query, key, value, out, lse
    if softcap:
        return capped_backward(*tensors, part.causal, part.mask, scale or query.shape[-1] ** -0.5, softcap)
    return _backward(*tensors, 0.0, part.causal, attn_mask=_cast_mask(part.mask, query), scale=scale)


def _cast_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(like.dtype)


def _accumulate(total: Tensor, keys: KeyIndex, part: Tensor) -> None:
    if isinstance(keys, slice):
        total[:, :, keys] += part
    else:
        total.index_add_(2, keys, part.to(total.dtype))
