"""Functions of attention scores that the kernels of tree attention and of the paged cache share.

An attention *sink* is a learned score of a head for a key whose value is 0: it only adds to the sum of the weights. A
*soft cap* replaces a score s by `cap * tanh(s / cap)`. Scores are in base 2, and running maxima are integers.
"""
# ruff: noqa: ANN001, ANN201, N803 - of kernels, whose arguments are pointers and constants

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a masked pair: finite, so that a fully masked row is not NaN yet, and a power of two, so that it stays
# exact when it is scaled and the largest score of such a row minus itself is 0.
MASKED_SCORE = tl.constexpr(-(2.0**100))


@triton.jit
def start_sums(SINKS, heads, HAS_SINKS: tl.constexpr):
    """Return the running maximum and the sum of rows that have seen no key but the sink of their head."""
    row_max = tl.full(heads.shape, MASKED_SCORE, tl.float32)
    row_sum = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + heads).to(tl.float32) * LOG2E
        row_max = tl.ceil(sink)
        row_sum = tl.exp2(sink - row_max)
    return row_max, row_sum


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent with the precision of float32: for small arguments as a continued fraction."""
    size, square = tl.abs(x), x * x
    decay = tl.exp2(size * (-2 * LOG2E))
    is_small = size < 0.6
    numerator = tl.where(is_small, size * (10395 + square * (1260 + square * 21)), 1 - decay)
    denominator = tl.where(is_small, 10395 + square * (4725 + square * (210 + square)), 1 + decay)
    ratio = numerator / denominator
    return tl.where(x < 0, -ratio, ratio)
