"""The norm in the middle of a layer on CUDA, with what stands around it: the sum before it, and two products behind it.

A compiler adds up on the way back what the products give the norm and what goes around it, and reads some of that
twice. Here one kernel each way does what lies between products, and reads and writes every number once. Sums are in
float32. Backward, a program owns rows of all the pack and sums the weight's gradient over them, and the sums of the
programs are added up: no two add to the same place, so gradients are the same bits each time.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - comes with a torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import triton_op, wrap_triton

MAX_PROGRAMS = 1056  # of a backward pass: eight for each multiprocessor of a large GPU


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _forward(X, RESIDUAL, WEIGHT, SUM, OUT, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    seen, at = column < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + column
    x, more = tl.load(X + at, mask=seen, other=0.0), tl.load(RESIDUAL + at, mask=seen, other=0.0)
    both = (x.to(tl.float32) + more.to(tl.float32)).to(SUM.dtype.element_ty)
    tl.store(SUM + at, both, mask=seen)
    exact, weight = both.to(tl.float32), tl.load(WEIGHT + column, mask=seen, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + EPS)
    tl.store(OUT + at, (exact * scale * weight).to(OUT.dtype.element_ty), mask=seen)


@triton.jit
def _backward(
    SUM, WEIGHT, GRAD, GRAD_GATE, GRAD_UP, D_SUM, D_WEIGHT, rows,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    seen = column < WIDTH
    weight = tl.load(WEIGHT + column, mask=seen, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * WIDTH + column
        exact = tl.load(SUM + at, mask=seen, other=0.0).to(tl.float32)
        one, other = tl.load(GRAD_GATE + at, mask=seen, other=0.0), tl.load(GRAD_UP + at, mask=seen, other=0.0)
        around = tl.load(GRAD + at, mask=seen, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + EPS)
        back, exact = one.to(tl.float32) + other.to(tl.float32), exact * scale
        d_weight += back * exact
        back *= weight
        found = around + scale * (back - exact * (tl.sum(back * exact, 0) / WIDTH))
        tl.store(D_SUM + at, found.to(D_SUM.dtype.element_ty), mask=seen)
    tl.store(D_WEIGHT + tl.program_id(0) * WIDTH + column, d_weight, mask=seen)


# -- operators -------------------------------------------------------------------------------------------------------


@triton_op("ramify::add_norm_backward", mutates_args={})
def _add_norm_backward(
    residual_sum: Tensor, weight: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    programs = min(MAX_PROGRAMS, len(residual_sum))
    d_both, d_weight = (
        torch.empty_like(residual_sum),
        residual_sum.new_empty(programs, residual_sum.shape[1], dtype=torch.float32),
    )
    wrap_triton(_backward)[(programs,)](
        residual_sum,
        weight,
        grad,
        grad_gate,
        grad_up,
        d_both,
        d_weight,
        len(residual_sum),
        **_constexpr_args(residual_sum, eps),
    )
    return d_both, d_weight.sum(0).to(weight.dtype)


def _constexpr_args(x: Tensor, eps: float) -> dict[str, Any]:
    """What the kernels are compiled for."""
    block = triton.next_power_of_2(x.shape[1])
    return {"EPS": eps, "WIDTH": x.shape[1], "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


@triton_op("ramify::add_norm_products", mutates_args={})
def add_norm_products(
    x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of `x` plus `more`; the products of their norm with `one` and `other`; and the norm, which only the way back
    asks for."""
    both, out = torch.empty_like(x), torch.empty_like(x)
    wrap_triton(_forward)[(len(x),)](x, residual, weight, both, out, **_constexpr_args(x, eps))
    return both, out @ gate.t(), out @ up.t(), out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, one, other, ctx.eps = inputs
    ctx.save_for_backward(output[0], output[3], weight, one, other)
    ctx.mark_non_differentiable(output[3])


def _autograd_backward(
    ctx: Any, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    both, out, weight, one, other = ctx.saved_tensors
    given = both, weight, grad.contiguous(), grad_gate @ one, grad_up @ other, ctx.eps
    d_both, d_weight = _add_norm_backward(*given)  # pyright: ignore[reportCallIssue]
    return d_both, d_both, d_weight, grad_gate.t() @ out, grad_up.t() @ out, None


add_norm_products.register_autograd(_autograd_backward, setup_context=_setup_context)
