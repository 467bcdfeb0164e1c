"""Residual add, RMSNorm and the two MLP products behind it on CUDA, with one kernel each way around the products.

A compiler adds up in the backward pass the gradients that the products give to the norm and the gradient of the
residual, and reads some of them twice. Here one kernel each way does everything between the products, and reads and
writes every number once. Sums are float32. In the backward pass a program owns rows from the whole pack and sums the
weight's gradient over them; the sums of the programs are added afterwards. No two programs add to the same memory, so
gradients are bitwise reproducible.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

MAX_PROGRAMS = 1056  # of a backward pass: eight for each multiprocessor of a large GPU


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _forward(X, RESIDUAL, WEIGHT, SUM, OUT, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask, offsets = column < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + column
    x, residual = tl.load(X + offsets, mask=mask, other=0.0), tl.load(RESIDUAL + offsets, mask=mask, other=0.0)
    residual_sum = (x.to(tl.float32) + residual.to(tl.float32)).to(SUM.dtype.element_ty)
    tl.store(SUM + offsets, residual_sum, mask=mask)
    x_float, weight = residual_sum.to(tl.float32), tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_float * x_float, 0) / WIDTH + EPS)
    tl.store(OUT + offsets, (x_float * scale * weight).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    SUM, WEIGHT, GRAD, GRAD_GATE, GRAD_UP, D_SUM, D_WEIGHT, rows,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * WIDTH + column
        x_float = tl.load(SUM + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_gate = tl.load(GRAD_GATE + offsets, mask=mask, other=0.0)
        grad_up = tl.load(GRAD_UP + offsets, mask=mask, other=0.0)
        grad_residual = tl.load(GRAD + offsets, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_float * x_float, 0) / WIDTH + EPS)
        grad_norm, x_float = grad_gate.to(tl.float32) + grad_up.to(tl.float32), x_float * scale
        d_weight += grad_norm * x_float
        grad_norm *= weight
        d_sum = grad_residual + scale * (grad_norm - x_float * (tl.sum(grad_norm * x_float, 0) / WIDTH))
        tl.store(D_SUM + offsets, d_sum.to(D_SUM.dtype.element_ty), mask=mask)
    tl.store(D_WEIGHT + tl.program_id(0) * WIDTH + column, d_weight, mask=mask)


# -- operators -------------------------------------------------------------------------------------------------------


@triton_op("ramify::add_norm_backward", mutates_args={})
def _add_norm_backward(
    residual_sum: Tensor, weight: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, width = residual_sum.shape
    programs = min(MAX_PROGRAMS, rows)
    d_sum, d_weight = torch.empty_like(residual_sum), residual_sum.new_empty(programs, width, dtype=torch.float32)
    wrap_triton(_backward)[(programs,)](
        residual_sum, weight, grad, grad_gate, grad_up, d_sum, d_weight, rows, **_constexpr_args(residual_sum, eps)
    )
    return d_sum, d_weight.sum(0).to(weight.dtype)


def _constexpr_args(x: Tensor, eps: float) -> dict[str, Any]:
    """Return the arguments that the kernels are compiled for."""
    block = triton.next_power_of_2(x.shape[1])
    return {"EPS": eps, "WIDTH": x.shape[1], "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


@triton_op("ramify::add_norm_products", mutates_args={})
def add_norm_products(
    x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x + residual`, its RMSNorm times `gate` and times `up`, and the norm itself for the backward pass."""
    residual_sum, norm = torch.empty_like(x), torch.empty_like(x)
    wrap_triton(_forward)[(x.shape[0],)](x, residual, weight, residual_sum, norm, **_constexpr_args(x, eps))
    return residual_sum, norm @ gate.t(), norm @ up.t(), norm


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, gate, up, ctx.eps = inputs
    ctx.save_for_backward(output[0], output[3], weight, gate, up)
    ctx.mark_non_differentiable(output[3])


def _autograd_backward(
    ctx: Any, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    residual_sum, norm, weight, gate, up = ctx.saved_tensors
    arguments = residual_sum, weight, grad.contiguous(), grad_gate @ gate, grad_up @ up, ctx.eps
    d_sum, d_weight = _add_norm_backward(*arguments)
    return d_sum, d_sum, d_weight, grad_gate.t() @ norm, grad_up.t() @ norm, None


add_norm_products.register_autograd(_autograd_backward, setup_context=_setup_context)
