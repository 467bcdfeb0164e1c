"""The formulas of the kernels in plain PyTorch: a dense mask instead of block lists; for tests and for reading.

They are computed in the dtype of their inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    end: Tensor,
    position: Tensor,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of [1, heads, tokens, head_dim] queries: query q sees key k iff k <= q < end[k].

    Keys and values may have fewer heads. With a `window`, `position[q] - position[k] < window` must hold as well.
    `softcap` limits scores by a tanh; `sinks` [heads] are the scores of a key with the value 0.
    """
    token = torch.arange(len(end), device=end.device)
    visible = (token[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    if window:
        visible &= position[:, None] - position[None, :] < window
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, len(end), 1)], -1)
    return scores.softmax(-1)[..., : len(end)] @ value


def add_norm_products(
    x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x + residual`, its RMSNorm times the transposed `gate` and `up`, and the norm itself."""
    residual_sum = x + residual
    norm = (_normalize(residual_sum, eps) * weight).to(x.dtype)
    return residual_sum, norm @ gate.t(), norm @ up.t(), norm


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head of `x` [tokens, heads, width], rotated by `cos` and `sin` [tokens, width]."""
    heads = _normalize(x, eps) * weight
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)


def _normalize(x: Tensor, eps: float) -> Tensor:
    exact = x if x.dtype == torch.float64 else x.float()
    return exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
