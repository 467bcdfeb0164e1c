"""Short convolutions along the paths of a forest on CUDA.

A token reads itself and its ancestors by a table [tokens, 3]. In the backward pass, the gradient of a token sums over
the tokens that read it. Nearly always these are its next tokens; for a token before a fork, a list names them. Lists
and sums have a fixed order, so gradients are bitwise reproducible.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, CHANNELS = 32, 128  # of a tile
ROW_SPLITS = 64  # programs that share the gradient of a weight


@triton.jit
def _convolve(
    X, WEIGHT, BIAS, ANCESTORS, OUT, rows, channels,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * B + tl.arange(0, B)
    row = tl.program_id(1) * R + tl.arange(0, R)
    is_channel, is_row = channel < channels, row < rows
    out = tl.zeros([R, B], tl.float32)
    if BIAS is not None:
        out += tl.load(BIAS + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = row
        if tap:
            source = tl.load(ANCESTORS + row * DEPTH + tap - 1, mask=is_row, other=-1)
        mask = ((source >= 0) & is_row)[:, None] & is_channel[None, :]
        x = tl.load(X + source.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(WEIGHT + channel * WIDTH + WIDTH - 1 - tap, mask=is_channel, other=0.0)
        out += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(OUT + offsets, out.to(OUT.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :])


@triton.jit
def _backward_rows(
    GRAD, WEIGHT, ANCESTORS, D_X, rows, channels,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the rows that only their next rows read."""
    channel = tl.program_id(0) * B + tl.arange(0, B)
    row = tl.program_id(1) * R + tl.arange(0, R)
    is_channel, is_row = channel < channels, row < rows
    d_x = tl.zeros([R, B], tl.float32)
    for tap in tl.static_range(WIDTH):
        reader = row + tap
        reads = reader < rows
        if tap:
            reads &= tl.load(ANCESTORS + reader * DEPTH + tap - 1, mask=reads, other=-1) == row
        mask = reads[:, None] & is_channel[None, :]
        grad = tl.load(GRAD + reader.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(WEIGHT + channel * WIDTH + WIDTH - 1 - tap, mask=is_channel, other=0.0)
        d_x += grad.to(tl.float32) * weight.to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(D_X + offsets, d_x.to(D_X.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :])


@triton.jit
def _backward_fork_rows(
    GRAD, WEIGHT, FORK_ROWS, READERS, D_X, channels, WIDTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the rows that are read by several rows at the same distance."""
    channel = tl.program_id(0) * B + tl.arange(0, B)
    is_channel = channel < channels
    entry = FORK_ROWS + 3 * tl.program_id(1)
    row = tl.load(entry)
    if row >= 0:
        d_x = tl.zeros([B], tl.float32)
        for index in range(tl.load(entry + 1), tl.load(entry + 2)):
            reader, tap = tl.load(READERS + 2 * index), tl.load(READERS + 2 * index + 1)
            grad = tl.load(GRAD + reader.to(tl.int64) * channels + channel, mask=is_channel, other=0.0)
            weight = tl.load(WEIGHT + channel * WIDTH + WIDTH - 1 - tap, mask=is_channel & (tap < WIDTH), other=0.0)
            d_x += grad.to(tl.float32) * weight.to(tl.float32)
        tl.store(D_X + row.to(tl.int64) * channels + channel, d_x.to(D_X.dtype.element_ty), mask=is_channel)


@triton.jit
def _backward_weight(
    X, GRAD, ANCESTORS, D_WEIGHT, D_BIAS, rows, channels,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a tap's weights over every n-th tile of rows, for n programs.

    The first tap's programs also sum the gradient of the bias. The programs of a tile's taps run side by side, so that
    all but one find the tile in the cache.
    """
    tap, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    is_channel = channel < channels
    d_weight, d_bias = tl.zeros([R, B], tl.float32), tl.zeros([R, B], tl.float32)
    for tile in range(split, tl.cdiv(rows, R), num_splits):
        row = tile * R + tl.arange(0, R)
        is_row = row < rows
        source = tl.load(ANCESTORS + row * DEPTH + tap - 1, mask=is_row & (tap > 0), other=-1)
        source = tl.where(tap > 0, source, row)
        grad_mask = is_row[:, None] & is_channel[None, :]
        mask = (source >= 0)[:, None] & grad_mask
        grad = tl.load(GRAD + row.to(tl.int64)[:, None] * channels + channel[None, :], mask=grad_mask, other=0.0)
        x = tl.load(X + source.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        d_weight += x.to(tl.float32) * grad.to(tl.float32)
        if tap == 0:
            d_bias += grad.to(tl.float32)
    own = split * channels + channel
    tl.store(D_WEIGHT + own * WIDTH + WIDTH - 1 - tap, tl.sum(d_weight, 0), mask=is_channel)
    if tap == 0:
        tl.store(D_BIAS + own, tl.sum(d_bias, 0), mask=is_channel)


@torch.library.custom_op("ramify::path_convolution", mutates_args=())
def path_convolution_op(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ancestors: Tensor, fork_rows: Tensor, readers: Tensor
) -> Tensor:
    """Return the convolution of `rows` [tokens, channels] along the paths; `weight` is [channels, width].

    `ancestors` are the tokens before each token on its path, `fork_rows` [rows, 3] the tokens before forks and where
    their lists in `readers` begin and end, and `readers` [entries, 2] a token and its distance.
    """
    out = torch.empty_like(rows)
    grid = triton.cdiv(rows.shape[1], CHANNELS), triton.cdiv(len(rows), ROWS)
    _convolve[grid](rows, weight, bias, ancestors, out, *rows.shape, **_constexpr_args(weight, ancestors))
    return out


@torch.library.custom_op("ramify::path_convolution_backward", mutates_args=())
def path_convolution_backward_op(
    grad: Tensor, rows: Tensor, weight: Tensor, ancestors: Tensor, fork_rows: Tensor, readers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows, the weight and the bias."""
    (tokens, channels), width = rows.shape, weight.shape[1]
    d_rows = torch.empty_like(rows)
    constants = _constexpr_args(weight, ancestors)
    channel_tiles = triton.cdiv(channels, CHANNELS)
    _backward_rows[channel_tiles, triton.cdiv(tokens, ROWS)](
        grad, weight, ancestors, d_rows, tokens, channels, **constants
    )
    _backward_fork_rows[channel_tiles, len(fork_rows)](
        grad, weight, fork_rows, readers, d_rows, channels, WIDTH=width, B=CHANNELS
    )
    splits = min(ROW_SPLITS, triton.cdiv(tokens, ROWS))
    d_weight = grad.new_empty(splits, channels, width, dtype=torch.float32)
    d_bias = grad.new_empty(splits, channels, dtype=torch.float32)
    arguments = rows, grad, ancestors, d_weight, d_bias, tokens, channels
    _backward_weight[width, channel_tiles, splits](*arguments, **constants)
    return d_rows, d_weight.sum(0).to(weight.dtype), d_bias.sum(0).to(weight.dtype)


def _constexpr_args(weight: Tensor, ancestors: Tensor) -> dict[str, Any]:
    return {"WIDTH": weight.shape[1], "DEPTH": ancestors.shape[1], "R": ROWS, "B": CHANNELS}


@path_convolution_op.register_fake
def _(rows: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(rows)


@path_convolution_backward_op.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight), weight.new_empty(len(weight))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, bias, *tables = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(rows, weight, *tables)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_rows, d_weight, d_bias = path_convolution_backward_op(grad.contiguous(), *ctx.saved_tensors)
    return d_rows, d_weight, d_bias if ctx.has_bias else None, None, None, None


path_convolution_op.register_autograd(_autograd_backward, setup_context=_setup_context)
