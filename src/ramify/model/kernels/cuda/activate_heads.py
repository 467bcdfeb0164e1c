"""Queries, keys and values of a gated delta net from the output of its convolution, on CUDA.

That is SiLU, and then a norm of queries and keys.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program; each computes one head


@triton.jit
def _activate_heads(
    MIXED, QUERY, KEY, VALUE, rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    EPS: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    head, row, column = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)[:, None], tl.arange(0, B)[None, :]
    mixed = MIXED + row.to(tl.int64) * (2 * KEY_HEADS * K + HEADS * V)
    if head < 2 * KEY_HEADS:
        mask = (row < rows) & (column < K)
        x = tl.load(mixed + head * K + column, mask=mask, other=0.0).to(tl.float32)
        x = x * tl.sigmoid(x)
        y = (x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]).to(KEY.dtype.element_ty)
        offsets = row.to(tl.int64) * (KEY_HEADS * K) + head % KEY_HEADS * K + column
        if head < KEY_HEADS:
            tl.store(QUERY + offsets, y, mask=mask)
        else:
            tl.store(KEY + offsets, y, mask=mask)
    else:
        mask, first = (row < rows) & (column < V), (head - 2 * KEY_HEADS) * V
        x = tl.load(mixed + 2 * KEY_HEADS * K + first + column, mask=mask, other=0.0).to(tl.float32)
        offsets = row.to(tl.int64) * (HEADS * V) + first + column
        tl.store(VALUE + offsets, (x * tl.sigmoid(x)).to(VALUE.dtype.element_ty), mask=mask)


@triton.jit
def _backward_activate_heads(
    MIXED, D_QUERY, D_KEY, D_VALUE, D_MIXED, rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    EPS: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    head, row, column = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)[:, None], tl.arange(0, B)[None, :]
    is_value, key_offset = head >= 2 * KEY_HEADS, row.to(tl.int64) * (KEY_HEADS * K) + head % KEY_HEADS * K + column
    width, first = K, head * K
    if is_value:
        width, first = V, 2 * KEY_HEADS * K + (head - 2 * KEY_HEADS) * V
    mask = (row < rows) & (column < width)
    offsets = row.to(tl.int64) * (2 * KEY_HEADS * K + HEADS * V) + first + column
    x = tl.load(MIXED + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(x)
    if is_value:
        value_offset = row.to(tl.int64) * (HEADS * V) + (head - 2 * KEY_HEADS) * V + column
        grad = tl.load(D_VALUE + value_offset, mask=mask, other=0.0).to(tl.float32)
    else:
        if head < KEY_HEADS:
            grad = tl.load(D_QUERY + key_offset, mask=mask, other=0.0).to(tl.float32)
        else:
            grad = tl.load(D_KEY + key_offset, mask=mask, other=0.0).to(tl.float32)
        active = x * gate
        scale = tl.rsqrt(tl.sum(active * active, 1) + EPS)[:, None]
        unit = active * scale
        grad = scale * (grad - unit * tl.sum(grad * unit, 1)[:, None])
    d_mixed = grad * gate * (1 + x * (1 - gate))
    tl.store(D_MIXED + offsets, d_mixed.to(D_MIXED.dtype.element_ty), mask=mask)


@torch.library.custom_op("ramify::activate_heads", mutates_args=())
def activate_heads_op(mixed: Tensor, key_heads: int, key_dim: int, value_dim: int, eps: float) -> list[Tensor]:
    """Apply SiLU to `mixed` [tokens, channels], and return queries, keys and values, [tokens, heads, width].

    Queries and keys have length 1. `mixed` is contiguous.
    """
    shapes = _get_shapes(mixed, key_heads, key_dim, value_dim)
    outputs = [mixed.new_empty(shape) for shape in shapes]
    _activate_heads[_get_grid(shapes)](mixed, *outputs, len(mixed), **_get_constants(shapes, eps))
    return outputs


@torch.library.custom_op("ramify::activate_heads_backward", mutates_args=())
def activate_heads_backward_op(mixed: Tensor, d_query: Tensor, d_key: Tensor, d_value: Tensor, eps: float) -> Tensor:
    """Return the gradient of `mixed`."""
    grads, d_mixed = (d_query, d_key, d_value), torch.empty_like(mixed)
    shapes = [tuple(grad.shape) for grad in grads]
    _backward_activate_heads[_get_grid(shapes)](mixed, *grads, d_mixed, len(mixed), **_get_constants(shapes, eps))
    return d_mixed


def _get_shapes(mixed: Tensor, key_heads: int, key_dim: int, value_dim: int) -> list[tuple[int, ...]]:
    tokens, channels = mixed.shape
    keys = tokens, key_heads, key_dim
    return [keys, keys, (tokens, (channels - 2 * key_heads * key_dim) // value_dim, value_dim)]


def _get_grid(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    return triton.cdiv(shapes[0][0], ROWS), sum(heads for _, heads, _ in shapes)


def _get_constants(shapes: list[tuple[int, ...]], eps: float) -> dict[str, Any]:
    (_, key_heads, key_dim), _, (_, heads, value_dim) = shapes
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "K": key_dim, "V": value_dim, "EPS": eps}
    return {**sizes, "R": ROWS, "B": triton.next_power_of_2(max(key_dim, value_dim))}


@activate_heads_op.register_fake
def _(mixed: Tensor, key_heads: int, key_dim: int, value_dim: int, eps: float) -> list[Tensor]:
    return [mixed.new_empty(shape) for shape in _get_shapes(mixed, key_heads, key_dim, value_dim)]


@activate_heads_backward_op.register_fake
def _(mixed: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(mixed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.eps = inputs[-1]


def _autograd_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    (mixed,) = ctx.saved_tensors
    return activate_heads_backward_op(mixed, *(grad.contiguous() for grad in grads), ctx.eps), None, None, None, None


activate_heads_op.register_autograd(_autograd_backward, setup_context=_setup_context)
