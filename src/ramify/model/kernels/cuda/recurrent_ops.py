"""The recurrent layers of one step on CUDA: states are read from their slots and written in place.

The gated delta rule is three kernels: the convolution with its window, the rule itself, and the norm with its gate. A
program of the rule holds a part of one sequence's matrix in registers and goes through the sequence's rows, in a decode
step a single one. So a step may mix decoding with chunks of prompts and be a CUDA graph. A gated short convolution is
the first kernel alone, with gates before and after it instead of an activation.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.paged_attention import StepSequences
from ramify.model.kernels.recurrent_ops import KEY_NORM_EPS, DeltaRuleWeights, RecurrentWeights, ShortConvWeights
from ramify.model.kernels.state_pool import StatePool

CONV_BLOCK = 512  # channels
VALUES_PER_PROGRAM = 64
HEADS_PER_PROGRAM = 4


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _convolve(
    PROJECTED, CONV, BIAS, WINDOWS, OUT, ROW_SEQUENCE, START, STOP, SLOT, row_stride, slot_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the convolution of a row, after SiLU. If GATED, inputs and outputs are multiplied by gates instead.

    The program of a sequence's first row also writes the next rows that read the window, and then updates the window.
    """
    row = tl.program_id(0)
    sequence = tl.load(ROW_SEQUENCE + row)
    if sequence >= 0:
        start, stop = tl.load(START + sequence), tl.load(STOP + sequence)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = channel < CHANNELS
        window = WINDOWS + tl.load(SLOT + sequence).to(tl.int64) * slot_stride + channel * WIDTH
        if row == start:
            for index in tl.static_range(WIDTH - 1):
                if start + index < stop:
                    _convolve_row(
                        PROJECTED, CONV, BIAS, window, OUT, start + index, row_stride, channel, mask,
                        CHANNELS, WIDTH, WIDTH - 1 - index, GATED, HAS_BIAS,
                    )  # fmt: skip
            for tap in tl.static_range(WIDTH):
                source = stop - WIDTH + tap
                if source >= start:
                    x = _load_input(PROJECTED, source, row_stride, channel, mask, CHANNELS, GATED)
                else:
                    x = tl.load(window + (stop - start) + tap, mask=mask)  # after `tap`, so not overwritten yet
                tl.store(window + tap, x, mask=mask)
        elif row - start >= WIDTH - 1:
            _convolve_row(
                PROJECTED, CONV, BIAS, window, OUT, row, row_stride, channel, mask,
                CHANNELS, WIDTH, 0, GATED, HAS_BIAS,
            )  # fmt: skip


@triton.jit
def _convolve_row(
    PROJECTED, CONV, BIAS, window, OUT, row, row_stride, channel, mask,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, FROM_WINDOW: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write one row; the first `FROM_WINDOW` inputs are in the window."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        if tap < FROM_WINDOW:
            x = tl.load(window + (WIDTH - FROM_WINDOW + tap), mask=mask, other=0.0)
        else:
            x = _load_input(PROJECTED, row - WIDTH + 1 + tap, row_stride, channel, mask, CHANNELS, GATED)
        weight = tl.load(CONV + channel * WIDTH + tap, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(BIAS + channel, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate = PROJECTED + row.to(tl.int64) * row_stride + CHANNELS + channel
        total *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    else:
        total = total / (1 + tl.exp(-total))
    tl.store(OUT + row.to(tl.int64) * CHANNELS + channel, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _load_input(PROJECTED, row, row_stride, channel, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Load a row's inputs of the convolution. Gated ones are rounded, as they are in the window."""
    pointers = PROJECTED + row.to(tl.int64) * row_stride + channel
    x = tl.load(pointers, mask=mask, other=0.0)
    if GATED:
        ungated = tl.load(pointers + 2 * CHANNELS, mask=mask, other=0.0)
        x = (x.to(tl.float32) * ungated.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _apply_rule(
    MIXED, PROJECTED, LOG_RATE, STEP_BIAS, STATES, OUT, START, STOP, SLOT, row_stride, slot_stride, first_strength,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Go through the rows of a sequence with a part of a head's state, of which the values are columns."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(START + sequence), tl.load(STOP + sequence)
    if start < stop:
        value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        key = tl.arange(0, KEYS)
        is_key, is_value = key < KEY_DIM, value < VALUE_DIM
        matrix = STATES + tl.load(SLOT + sequence).to(tl.int64) * slot_stride + head * (KEY_DIM * VALUE_DIM)
        pointers, mask = matrix + key[:, None] * VALUE_DIM + value[None, :], is_key[:, None] & is_value[None, :]
        state = tl.load(pointers, mask=mask, other=0.0)
        rate = tl.exp(tl.load(LOG_RATE + head).to(tl.float32))
        bias = tl.load(STEP_BIAS + head).to(tl.float32)
        key_head = head // (HEADS // KEY_HEADS)
        for row in range(start, stop):
            mixed = MIXED + tl.cast(row, tl.int64) * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
            numbers = PROJECTED + tl.cast(row, tl.int64) * row_stride + first_strength + head
            q = tl.load(mixed + key_head * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(mixed + (KEY_HEADS + key_head) * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value, mask=is_value, other=0.0)
            strength = tl.sigmoid(tl.load(numbers).to(tl.float32))
            step = tl.load(numbers + HEADS).to(tl.float32) + bias
            step = tl.where(step > 20.0, step, tl.log(1 + tl.exp(tl.minimum(step, 20.0))))
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
            k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
            state *= tl.exp(-rate * step)
            added = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * strength
            state += k[:, None] * added[None, :]
            out = tl.sum(state * q[:, None], 0)
            target = OUT + (tl.cast(row, tl.int64) * HEADS + head) * VALUE_DIM + value
            tl.store(target, out.to(OUT.dtype.element_ty), mask=is_value)
        tl.store(pointers, state, mask=mask)


@triton.jit
def _norm_and_gate(
    X, PROJECTED, WEIGHT, row_stride, first_gate,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalize each head of a row in place, and multiply it by SiLU of its gate."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    value = tl.arange(0, VALUES)[None, :]
    mask, offsets = (head < HEADS) & (value < VALUE_DIM), head * VALUE_DIM + value
    x = tl.load(X + row * (HEADS * VALUE_DIM) + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(PROJECTED + row * row_stride + first_gate + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + value, mask=value < VALUE_DIM, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + EPS)[:, None] * weight * gate / (1 + tl.exp(-gate))
    tl.store(X + row * (HEADS * VALUE_DIM) + offsets, x.to(X.dtype.element_ty), mask=mask)


# -- operators -------------------------------------------------------------------------------------------------------


def compute_recurrent(
    weights: RecurrentWeights, projected: Tensor, sequences: StepSequences, states: StatePool, layer: int, eps: float
) -> Tensor:
    """Return what the second projection of a recurrent layer gets, [rows, channels]; the states are changed."""
    if isinstance(weights, ShortConvWeights):
        windows = states.get_tensor(layer, "conv")
        return _convolve_rows(weights.conv, weights.bias, projected, sequences, windows, is_gated=True)
    return compute_delta_rule(weights, projected, sequences, states, layer, eps)


def _convolve_rows(
    conv: Tensor, bias: Tensor | None, projected: Tensor, sequences: StepSequences, windows: Tensor, *, is_gated: bool
) -> Tensor:
    """Return the convolution of the rows, [rows, channels]; `windows` are changed."""
    rows, (channels, width) = len(projected), conv.shape
    out = torch.empty(rows, channels, dtype=projected.dtype, device=projected.device)
    _convolve[(rows, triton.cdiv(channels, CONV_BLOCK))](
        projected, conv, conv if bias is None else bias, windows, out,
        sequences.row_sequence, sequences.start, sequences.stop, sequences.state_slot,
        projected.stride(0), windows.stride(0),
        CHANNELS=channels, WIDTH=width, BLOCK=CONV_BLOCK, GATED=is_gated, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


def compute_delta_rule(
    weights: DeltaRuleWeights,
    projected: Tensor,
    sequences: StepSequences,
    states: StatePool,
    layer: int,
    eps: float,
) -> Tensor:
    """Return the gated and normalized outputs of the rows, [rows, heads * value_dim]; the states are changed."""
    windows, matrices = states.get_tensor(layer, "conv"), states.get_tensor(layer, "recurrent")
    rows, heads, value_dim = len(projected), weights.heads, weights.value_dim
    mixed = _convolve_rows(weights.conv, None, projected, sequences, windows, is_gated=False)
    out = torch.empty(rows, heads * value_dim, dtype=projected.dtype, device=projected.device)
    bounds = sequences.start, sequences.stop, sequences.state_slot
    row_stride, first_gate = projected.stride(0), len(weights.conv)
    values = min(VALUES_PER_PROGRAM, triton.next_power_of_2(value_dim))
    _apply_rule[(len(sequences.start), heads, triton.cdiv(value_dim, values))](
        mixed, projected, weights.log_rate, weights.step_bias, matrices, out, *bounds, row_stride, matrices.stride(0),
        first_gate + heads * value_dim,
        HEADS=heads, KEY_HEADS=weights.key_heads, KEY_DIM=weights.key_dim, VALUE_DIM=value_dim,
        KEYS=triton.next_power_of_2(weights.key_dim), VALUES=values, EPS=KEY_NORM_EPS, SCALE=weights.key_dim**-0.5,
        num_warps=4,
    )  # fmt: skip
    _norm_and_gate[(rows, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        out, projected, weights.norm, row_stride, first_gate, HEADS=heads, VALUE_DIM=value_dim,
        VALUES=triton.next_power_of_2(value_dim), TILE=HEADS_PER_PROGRAM, EPS=eps, num_warps=4,
    )  # fmt: skip
    return out
