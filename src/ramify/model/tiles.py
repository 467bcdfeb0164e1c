"""Tree attention on a CPU: products of a stretch of queries with only the keys it sees.

A row falls into *runs*, stretches without forks. Inside a long run attention is plain and causal, and all that hangs
from it sees the whole of it: one dense product without a mask. Short runs are gathered into tiles, where a small mask
says who sees whom. What a query finds in several products meets through their log-sum-exp, forward and backward, so
every tensor is linear in the row and no [query, key] mask of the row ever exists. A row of chains costs what it would
cost in a batch.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.trace.columns import Int32Array

MIN_OWN_RUN = 32  # a run this long is no part of a tile
MIN_SHARED_RUN = 128  # a run this long is seen by all that hangs from it in one product
TILE_QUERIES = 128  # of a tile
KeyIndex = slice | Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class PartialAttention(NamedTuple):
    """Queries [start, stop) against keys."""

    start: int
    stop: int
    keys: KeyIndex
    mask: Tensor | None = None  # [queries, keys], 0 or -inf
    causal: bool = False
    first: bool = False  # of these queries: every query meets itself in exactly one product, which comes first


def split_attention(end: Int32Array, position: Int32Array, window: int) -> list[PartialAttention]:
    """The products of a row; `window` is 0 where attention has none."""
    bounds = find_run_bounds(end)
    wide = [] if window else [(a, b) for a, b in pairwise(bounds) if b - a >= MIN_SHARED_RUN and end[a] > b]
    apart = np.zeros(len(end), bool)  # keys that are seen through products of their own
    for start, stop in wide:
        apart[start:stop] = True
    found: list[PartialAttention] = []
    for start, stop, single in _iter_query_ranges(bounds, TILE_QUERIES if window else None):
        seen = (end[:start] > start) & ~apart[:start]
        common = end[:start] >= stop
        if window:
            seen &= position[:start] > position[start:stop].min() - window
            common &= position[:start] > position[start:stop].max() - window
        partly, shared = np.flatnonzero(seen & ~common), np.flatnonzero(seen & common)
        own = np.concatenate([partly, np.arange(start, stop)])
        causal = single and not len(partly) and (not window or stop - start <= window)
        mask = None if causal else _build_visibility_mask(end, position, window, np.arange(start, stop), own)
        found.append(PartialAttention(start, stop, _as_key_index(own), mask, causal, first=True))
        if len(shared):
            found.append(PartialAttention(start, stop, _as_key_index(shared)))
    return found + [PartialAttention(stop, int(end[start]), slice(start, stop)) for start, stop in wide]


def find_run_bounds(end: Int32Array) -> list[int]:
    """Where runs begin, and the end of the last."""
    forks = (end[1:] != end[:-1]) | (end[:-1] == np.arange(1, len(end)))
    return [0, *(np.flatnonzero(forks) + 1).tolist(), len(end)]


def _iter_query_ranges(bounds: list[int], max_length: int | None) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether it is without forks): long runs alone, in pieces of `most`, short ones together."""
    tile: tuple[int, int, bool] | None = None
    for start, stop in pairwise(bounds):
        if tile and (stop - start >= MIN_OWN_RUN or stop - tile[0] > TILE_QUERIES):
            yield tile
            tile = None
        if stop - start >= MIN_OWN_RUN:
            size = max_length or stop - start
            yield from ((at, min(at + size, stop), True) for at in range(start, stop, size))
        elif stop > start:
            tile = (tile[0], stop, False) if tile else (start, stop, True)
    if tile:
        yield tile


def _build_visibility_mask(
    end: Int32Array, position: Int32Array, window: int, queries: np.ndarray, keys: np.ndarray
) -> Tensor:
    seen = (keys[None, :] <= queries[:, None]) & (queries[:, None] < end[keys][None, :])
    if window:
        seen &= position[queries][:, None] - position[keys][None, :] < window
    return torch.zeros(seen.shape).masked_fill_(~torch.from_numpy(seen), float("-inf"))


def _as_key_index(index: np.ndarray) -> KeyIndex:
    """The keys as a slice where they lie together, so that nothing is copied."""
    if index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


class CpuTreeAttention(torch.autograd.Function):
    """[1, heads, tokens, head_dim] queries against keys and values of as many heads or fewer."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[PartialAttention], scale: float | None
    ) -> Tensor:
        out, weight = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        for each in parts:
            at = slice(each.start, each.stop)
            how = {"attn_mask": _cast_mask(each.mask, query), "scale": scale}
            seen = key[:, :, each.keys], value[:, :, each.keys]
            found, total = _forward(query[:, :, at], *seen, 0.0, each.causal, **how)
            if not each.first:
                before, both = weight[:, :, at], torch.logaddexp(weight[:, :, at], total)
                found = found * (total - both).exp_().unsqueeze(-1)
                found += out[:, :, at] * (before - both).exp_().unsqueeze(-1)
                total = both
            out[:, :, at], weight[:, :, at] = found, total
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.row, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, weight = ctx.saved_tensors
        d_query, d_key, d_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
        for each in ctx.row:
            at = slice(each.start, each.stop)
            grad, asked, found, total = (tensor[:, :, at] for tensor in (grads[0], query, out, weight))
            how = {"attn_mask": _cast_mask(each.mask, query), "scale": ctx.scale}
            seen = key[:, :, each.keys], value[:, :, each.keys]
            parts = _backward(grad, asked, *seen, found, total, 0.0, each.causal, **how)
            d_query[:, :, at] += parts[0]
            _accumulate(d_key, each.keys, parts[1])
            _accumulate(d_value, each.keys, parts[2])
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _cast_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(like.dtype)


def _accumulate(total: Tensor, keys: KeyIndex, part: Tensor) -> None:
    if isinstance(keys, slice):
        total[:, :, keys] += part
    else:
        total.index_add_(2, keys, part.to(total.dtype))
