"""Causal attention for packs of long chains on CUDA, through cuDNN.

A document of tens of thousands of tokens is trained as a chain without forks. A pack of such chains needs no tree mask,
and cuDNN's causal kernel computes it about a third faster than the tree kernels. cuDNN prepares a kernel for each
length, so chains are padded to a few lengths; a chain does not see its padding, which comes after it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from ramify.trace.columns import Int32Array

MIN_CHAIN_TOKENS = 8192  # shorter chains are faster in the tree kernels
LENGTH_MULTIPLE = 512  # chains are padded to a multiple of it
SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class ChainLengths:
    """The lengths of a pack's chains. It is a class, because compiled code would be specialized to a list."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @classmethod
    def from_ends(cls, end: Int32Array) -> "ChainLengths | None":
        """Return the lengths if the pack holds only long chains, with padding behind them; None otherwise."""
        lengths: list[int] = []
        start = 0
        while start < len(end) and (stop := int(end[start])) > start + 1:
            if stop < start + MIN_CHAIN_TOKENS or (end[start:stop] != stop).any():
                return None
            lengths.append(stop - start)
            start = stop
        only_padding = np.array_equal(end[start:], np.arange(start + 1, len(end) + 1))
        return cls(lengths) if lengths and only_padding else None


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, chain_lengths: ChainLengths, scale: float | None
) -> Tensor:
    """Return the causal attention within each chain, [1, heads, tokens, head_dim], and zeros for the padding.

    Keys and values may have fewer heads than queries.
    """
    if query.dtype == torch.float32:  # no kernel shares keys between heads
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    lengths = chain_lengths.lengths
    padding = query.shape[2] - sum(lengths)
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        for length, *chain in zip(lengths, *(tensor.split([*lengths, padding], 2) for tensor in (query, key, value))):
            missing = -length % LENGTH_MULTIPLE
            q, k, v = (F.pad(tensor, (0, 0, 0, missing)) if missing else tensor for tensor in chain)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            outputs.append(out[:, :, :length])
    return torch.cat([*outputs, query.new_zeros(*query.shape[:2], padding, value.shape[-1])], 2)


causal_attention: Any = torch.compiler.disable(_causal_attention)
