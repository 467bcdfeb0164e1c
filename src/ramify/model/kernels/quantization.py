"""Matrices in 8 or 4 bits: codes, and one scale for each block of a row.

A block is scaled to its largest absolute value. In 8 bits a code is a multiple of 1/127 of it; in 4 bits one of 16
levels, the quantiles of a normal distribution (NF4), since weights of a block are distributed like one. The trainer
dequantizes a matrix just before a product and drops it after it, so only one of them has all its bits at a time;
engines on GPUs multiply with the codes (`ramify.model.kernels.cuda.quantized_products`).
"""

import math
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ramify.core.errors import ModelUnsupported

QuantizeMode = Literal["8bit", "4bit"]
MAX_BLOCK = 64
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class QuantizedMatrix(NamedTuple):
    """A matrix [rows, columns]: int8 codes of that shape, or uint8 pairs of 4-bit codes, and scales [rows, blocks].

    A pair is a column in the first half of a block (the low bits), and the column half a block after it: kernels then
    read both halves with contiguous columns.
    """

    codes: Tensor
    scales: Tensor

    @property
    def is_in_pairs(self) -> bool:
        """Whether codes have 4 bits."""
        return self.codes.dtype == torch.uint8

    @property
    def num_columns(self) -> int:
        """The columns of the matrix."""
        return self.codes.shape[1] * (2 if self.is_in_pairs else 1)

    @property
    def block(self) -> int:
        """The columns of a block."""
        return self.num_columns // self.scales.shape[1]


def quantize_matrix(matrix: Tensor, mode: QuantizeMode) -> QuantizedMatrix:
    """Quantize a matrix. Raises ModelUnsupported if its columns are not a multiple of two."""
    rows, columns = matrix.shape
    block = math.gcd(columns, MAX_BLOCK)
    if block < 2:
        raise ModelUnsupported(f"blocks need at least two columns, but the matrix has {columns}")
    values = matrix.detach().float().contiguous().view(rows, -1, block)
    num_steps = 127 if mode == "8bit" else 1
    scales = (values.abs().amax(-1) / num_steps).to(matrix.dtype)
    values = values / scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if mode == "8bit":
        return QuantizedMatrix(values.round_().clamp_(-127, 127).to(torch.int8).view(rows, columns), scales)
    levels = get_levels(matrix.device)
    codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    first, second = codes.chunk(2, -1)
    return QuantizedMatrix((first | second << 4).view(rows, -1), scales)


def dequantize_matrix(matrix: QuantizedMatrix) -> Tensor:
    """Return the matrix, in the dtype of its scales, with operators of PyTorch: the reference of the kernels."""
    codes, scales = matrix
    rows, blocks = scales.shape
    codes = codes.view(rows, blocks, -1)
    if codes.dtype == torch.int8:
        return (codes * scales.unsqueeze(-1)).view(rows, -1)
    values = get_levels(codes.device)[torch.cat((codes & 15, codes >> 4), -1).int()]
    return (values * scales.float().unsqueeze(-1)).to(scales.dtype).view(rows, -1)


@cache
def get_levels(device: torch.device) -> Tensor:
    """Return the levels of 4-bit codes."""
    return torch.tensor(NF4_LEVELS, device=device)
