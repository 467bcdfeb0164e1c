"""Attention with softcapped scores on a CPU, in PyTorch, with the interface of torch's own operator, which has no cap.

A score s becomes `cap * tanh(s / cap)`; the mask is added after it. Queries are computed in pieces, so that memory is
linear in the keys. Everything is float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_QUERIES = 128


def capped_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of [1, heads, queries, head_dim], and the log-sum-exp of its scores.

    Keys and values may have fewer heads; `mask` is [queries, keys], 0 or -inf.
    """
    repeats = query.shape[1] // key.shape[1]
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for queries, keys in _iter_pieces(query.shape[2], key.shape[2], causal):
        piece_key, piece_value = (tensor[:, :, keys].float().repeat_interleave(repeats, 1) for tensor in (key, value))
        scores, _ = _compute_scores(query[:, :, queries], piece_key, causal, _slice(mask, queries), scale, cap)
        sums.append(scores.logsumexp(-1))
        outputs.append((scores - sums[-1].unsqueeze(-1)).exp_() @ piece_value)
    return torch.cat(outputs, 2).to(query.dtype), torch.cat(sums, 2)


def capped_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `out` and `lse` may include other keys than these."""
    repeats = query.shape[1] // key.shape[1]
    d_query, d_key, d_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value))
    for queries, keys in _iter_pieces(query.shape[2], key.shape[2], causal):
        piece_key, piece_value = (tensor[:, :, keys].float().repeat_interleave(repeats, 1) for tensor in (key, value))
        piece_query, piece_grad, piece_out = (tensor[:, :, queries].float() for tensor in (query, grad, out))
        scores, slope = _compute_scores(piece_query, piece_key, causal, _slice(mask, queries), scale, cap)
        weights = (scores - lse[:, :, queries].unsqueeze(-1)).exp_()
        delta = (piece_grad * piece_out).sum(-1, keepdim=True)
        d_scores = weights * (piece_grad @ piece_value.transpose(2, 3) - delta) * slope * scale
        d_query[:, :, queries] = d_scores @ piece_key
        for total, part in (
            (d_key, d_scores.transpose(2, 3) @ piece_query),
            (d_value, weights.transpose(2, 3) @ piece_grad),
        ):
            total[:, :, keys] += part.unflatten(1, (-1, repeats)).sum(2)
    return d_query, d_key, d_value


def _iter_pieces(num_queries: int, num_keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of the queries, and the keys that they see; causal queries are the last ones of the keys."""
    for start in range(0, num_queries, PIECE_QUERIES):
        stop = min(start + PIECE_QUERIES, num_queries)
        yield slice(start, stop), slice(0, num_keys - num_queries + stop if causal else num_keys)


def _slice(mask: Tensor | None, queries: slice) -> Tensor | None:
    return None if mask is None else mask[queries]


def _compute_scores(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the capped and masked scores, and the slope of the cap at each."""
    ratio = torch.tanh(query.float() @ key.transpose(2, 3) * (scale / cap))
    scores = ratio * cap
    if mask is not None:
        scores += mask
    if causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
        scores.masked_fill_(~visible, float("-inf"))
    return scores, 1 - ratio * ratio
