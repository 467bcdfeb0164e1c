"""Sums over rows that repeat a token, on CUDA: the backward pass of reading the rows of a pack's chunks.

Each sum has a fixed order, so gradients are bitwise reproducible.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # of a row that a program sums, at most


@triton.jit
def _sum_rows(X, TOKEN_ROWS, FIRST, OUT, columns, B: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    is_column = column < columns
    total = tl.zeros([B], tl.float32)
    for index in range(tl.load(FIRST + token), tl.load(FIRST + token + 1)):
        row = tl.load(TOKEN_ROWS + index).to(tl.int64)
        total += tl.load(X + row * columns + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(OUT + token.to(tl.int64) * columns + column, total.to(OUT.dtype.element_ty), mask=is_column)


def sum_rows(rows: Tensor, token_rows: Tensor, first: Tensor) -> Tensor:
    """Return the sum of the rows of each token, in float32 until it is stored.

    `token_rows` [rows] are the rows of the first token, of the second, ...; `first` [tokens + 1] where each begins.
    """
    out = rows.new_empty(len(first) - 1, *rows.shape[1:])
    columns = out[:1].numel()
    block = min(COLUMNS, triton.next_power_of_2(columns))
    _sum_rows[len(out), triton.cdiv(columns, block)](rows, token_rows, first, out, columns, B=block)
    return out
