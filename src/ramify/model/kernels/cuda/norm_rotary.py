"""RMSNorm and rotary embedding of queries and keys on CUDA, as one kernel each way.

For models that normalize each head before they rotate it, a compiler makes several kernels, for sums over rows, sums
over columns and shifted reads, which read and write the same numbers again. Here a row is one head of one token, and
its two halves are separate, so that the rotation is arithmetic between registers. Everything is computed in float32 and
rounded once. In the backward pass a program owns many rows and sums the weight's gradient over them; the sums of the
programs are added afterwards. No two programs add to the same memory, so gradients are bitwise reproducible.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS_PER_TILE = 8
MAX_PROGRAMS = 1056  # of a backward pass: eight for each multiprocessor of a large GPU


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_halves(X, offsets, mask, HALF: tl.constexpr):
    """Load both halves of rows, in float32."""
    first = tl.load(X + offsets, mask=mask, other=0.0)
    return first.to(tl.float32), tl.load(X + offsets + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _inverse_rms(first, second, HALF: tl.constexpr, EPS: tl.constexpr):
    """Return one over the root mean square of each row."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + EPS)[:, None]


@triton.jit
def _forward(
    X, WEIGHT, COS, SIN, OUT, rows,
    HEADS: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], [ROWS, HALF])  # threads need not exchange the weights
    mask, offsets, angle_offsets = row < rows, row * (2 * HALF) + column, row // HEADS * (2 * HALF) + column
    first, second = _load_halves(X, offsets, mask, HALF)
    weights = _load_halves(WEIGHT, column, column < HALF, HALF)
    cos, sin = _load_halves(COS, angle_offsets, mask, HALF), _load_halves(SIN, angle_offsets, mask, HALF)
    scale = _inverse_rms(first, second, HALF, EPS)
    first, second = first * scale * weights[0], second * scale * weights[1]
    tl.store(OUT + offsets, (first * cos[0] - second * sin[0]).to(OUT.dtype.element_ty), mask=mask)
    tl.store(OUT + offsets + HALF, (second * cos[1] + first * sin[1]).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    X, WEIGHT, COS, SIN, GRAD, D_X, D_WEIGHT, rows,
    HEADS: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, HALF)[None, :]
    weights = _load_halves(WEIGHT, column, column < HALF, HALF)
    d_first, d_second = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask, offsets, angle_offsets = row < rows, row * (2 * HALF) + column, row // HEADS * (2 * HALF) + column
        first, second = _load_halves(X, offsets, mask, HALF)
        grads = _load_halves(GRAD, offsets, mask, HALF)
        cos, sin = _load_halves(COS, angle_offsets, mask, HALF), _load_halves(SIN, angle_offsets, mask, HALF)
        scale = _inverse_rms(first, second, HALF, EPS)
        first, second = first * scale, second * scale
        grad_first, grad_second = grads[0] * cos[0] + grads[1] * sin[1], grads[1] * cos[1] - grads[0] * sin[0]
        d_first, d_second = d_first + grad_first * first, d_second + grad_second * second
        grad_first, grad_second = grad_first * weights[0], grad_second * weights[1]
        projection = ((tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)) / (2 * HALF))[:, None]
        tl.store(D_X + offsets, (scale * (grad_first - first * projection)).to(D_X.dtype.element_ty), mask=mask)
        tl.store(
            D_X + offsets + HALF, (scale * (grad_second - second * projection)).to(D_X.dtype.element_ty), mask=mask
        )
    own_weights = D_WEIGHT + tl.program_id(0) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(own_weights, tl.sum(d_first, 0))
    tl.store(own_weights + HALF, tl.sum(d_second, 0))


# -- operators -------------------------------------------------------------------------------------------------------


@triton_op("ramify::norm_rotate", mutates_args={})
def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head of `x` times `weight` [width], rotated by `cos` and `sin` [tokens, width].

    `x` is contiguous, [tokens, heads, width].
    """
    out, rows = torch.empty_like(x), x.shape[0] * x.shape[1]
    wrap_triton(_forward)[(-(-rows // ROWS_PER_TILE),)](x, weight, cos, sin, out, rows, **_constexpr_args(x, eps))
    return out


@triton_op("ramify::norm_rotate_backward", mutates_args={})
def _norm_rotate_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] * x.shape[1]
    programs = min(MAX_PROGRAMS, -(-rows // ROWS_PER_TILE))
    d_x, d_weight = torch.empty_like(x), x.new_empty(programs, x.shape[2], dtype=torch.float32)
    wrap_triton(_backward)[(programs,)](x, weight, cos, sin, grad, d_x, d_weight, rows, **_constexpr_args(x, eps))
    return d_x, d_weight.sum(0).to(weight.dtype)


def _constexpr_args(x: Tensor, eps: float) -> dict[str, Any]:
    """Return the arguments that the kernels are compiled for."""
    return {"HEADS": x.shape[1], "HALF": x.shape[2] // 2, "EPS": eps, "ROWS": ROWS_PER_TILE, "num_warps": 2}


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    arguments = grad.contiguous(), *ctx.saved_tensors, ctx.eps
    d_x, d_weight = _norm_rotate_backward(*arguments)
    return d_x, d_weight, None, None, None


norm_rotate.register_autograd(_autograd_backward, setup_context=_setup_context)
