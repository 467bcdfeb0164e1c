"""Logprobs, entropies and log-sum-exps of rows of logits, and the gradient of the logits, on CUDA.

One kernel computes each pass, in one sweep over the logits. A target outside of the vocabulary gives NaN.
`transform` is scale and cap of a `LogitTransform`.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.cuda.scores import tanh

REDUCED_COLUMNS, GRADIENT_COLUMNS = 8192, 4096  # columns that a program processes at a time


@triton.jit
def _transform(x, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Compute `LogitTransform.apply`."""
    if CAP != 0:
        x = tanh(x * (SCALE / CAP)) * CAP
    elif SCALE != 1:
        x *= SCALE
    return x


@triton.jit
def _reduce_row(
    LOGITS, TARGETS, INV_TEMPERATURE, LOGPROB, ENTROPY, LOGSUMEXP, vocab,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Go through a row with a running maximum m; the sums of exp(x - m) and of x·exp(x - m) shrink when it grows."""
    row = tl.program_id(0)
    logits, inv_temperature = LOGITS + row.to(tl.int64) * vocab, tl.load(INV_TEMPERATURE + row)
    # The maximum begins finite, so that a first block of -inf minus it is not NaN.
    row_max, total, product = -3.0e38, tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocab
        x = _transform(tl.load(logits + column, mask=mask, other=0.0).to(tl.float32), SCALE, CAP) * inv_temperature
        new_max = tl.maximum(row_max, tl.max(tl.where(mask, x, float("-inf")), 0))
        weight, decay = tl.where(mask, tl.exp(x - new_max), 0.0), tl.exp(row_max - new_max)
        total, product, row_max = total * decay + weight, product * decay + weight * x, new_max
    row_total = tl.sum(total, 0)
    logsumexp = row_max + tl.log(row_total)
    target_id = tl.load(TARGETS + row)
    is_token = (target_id >= 0) & (target_id < vocab)
    target = tl.load(logits + target_id, mask=is_token, other=float("nan")).to(tl.float32)
    tl.store(LOGPROB + row, _transform(target, SCALE, CAP) * inv_temperature - logsumexp)
    tl.store(ENTROPY + row, logsumexp - tl.sum(product, 0) / row_total)
    tl.store(LOGSUMEXP + row, logsumexp)


@triton.jit
def _differentiate(
    LOGITS, TARGETS, INV_TEMPERATURE, LOGSUMEXP, GRAD, OUT, vocab,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (1 at the target - probability) · gradient / temperature, times the derivative of the transform."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, offsets = column < vocab, row.to(tl.int64) * vocab + column
    inv_temperature = tl.load(INV_TEMPERATURE + row)
    x = _transform(tl.load(LOGITS + offsets, mask=mask, other=0.0).to(tl.float32), SCALE, CAP)
    probability = tl.exp(x * inv_temperature - tl.load(LOGSUMEXP + row))
    is_target = column == tl.load(TARGETS + row)
    gradient = (tl.where(is_target, 1.0, 0.0) - probability) * (tl.load(GRAD + row) * inv_temperature)
    if CAP != 0:
        gradient *= 1 - (x / CAP) * (x / CAP)
    tl.store(OUT + offsets, (gradient * SCALE).to(OUT.dtype.element_ty), mask=mask)


def reduce_logits(
    logits: Tensor, target_ids: Tensor, inv_temperature: Tensor, transform: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprob of each row's target token, the entropy and the log-sum-exp, in float32."""
    (rows, vocab), (scale, cap) = logits.shape, transform
    logprob, entropy, logsumexp = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _reduce_row[(rows,)](
        logits, target_ids, inv_temperature, logprob, entropy, logsumexp, vocab,
        SCALE=scale, CAP=cap, BLOCK=min(REDUCED_COLUMNS, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return logprob, entropy, logsumexp


def differentiate_logits(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    transform: tuple[float, float],
) -> Tensor:
    """Return the gradient of the head's product, from the gradient of the logprobs."""
    (rows, vocab), (scale, cap), out = logits.shape, transform, torch.empty_like(logits)
    block = min(GRADIENT_COLUMNS, triton.next_power_of_2(vocab))
    _differentiate[rows, triton.cdiv(vocab, block)](
        logits, target_ids, inv_temperature, logsumexp, grad, out, vocab, SCALE=scale, CAP=cap, BLOCK=block, num_warps=4
    )
    return out
