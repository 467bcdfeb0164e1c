"""Rows of long chains on CUDA, through the kernel made for plain causal attention.

A document of tens of thousands of tokens is trained as a chain without forks. Nothing of a tree is left in such a row,
and cuDNN's causal kernel computes it about a third faster than one that asks a mask. cuDNN prepares a kernel for each
length it meets, so chains are padded to a few of them; behind a chain nothing is seen by it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from ramify.trace.columns import Int32Array

MIN_CHAIN_TOKENS = 8192  # tokens of a chain from which on this is faster
LENGTH_MULTIPLE = 512  # lengths are multiples of it
SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class ChainLengths:
    """The lengths of a row's chains. Compiled code takes it as it is, and would be made again for another list."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @classmethod
    def from_ends(cls, end: Int32Array) -> "ChainLengths | None":
        """If the row holds nothing else and all are long; padding behind them aside."""
        lengths: list[int] = []
        start = 0
        while start < len(end) and (stop := int(end[start])) > start + 1:
            if stop < start + MIN_CHAIN_TOKENS or (end[start:stop] != stop).any():
                return None
            lengths.append(stop - start)
            start = stop
        alone = np.array_equal(end[start:], np.arange(start + 1, len(end) + 1))
        return cls(lengths) if lengths and alone else None


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, chain_lengths: ChainLengths, scale: float | None
) -> Tensor:
    """[1, heads, tokens, head_dim] queries against keys and values of as many heads or fewer, each chain by itself;
    zeros for the padding behind the last."""
    if query.dtype == torch.float32:  # no kernel shares keys between heads
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    lengths = chain_lengths.lengths
    rest = query.shape[2] - sum(lengths)
    grouped = query.shape[1] != key.shape[1]
    found: list[Tensor] = []
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        for length, *parts in zip(lengths, *(each.split([*lengths, rest], 2) for each in (query, key, value))):
            q, k, v = (
                F.pad(each, (0, 0, 0, -length % LENGTH_MULTIPLE)) if length % LENGTH_MULTIPLE else each
                for each in parts
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            found.append(out[:, :, :length])
    return torch.cat([*found, query.new_zeros(*query.shape[:2], rest, value.shape[-1])], 2)


causal_attention: Any = torch.compiler.disable(_causal_attention)
