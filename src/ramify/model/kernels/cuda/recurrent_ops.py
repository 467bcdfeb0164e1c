"""The recurrent layers of one step on CUDA: states are read from their slots and written in place.

The gated delta rule is three kernels: the convolution with its window, the rule itself, and the norm with its gate. A
program of the rule holds a part of one sequence's matrix in registers and goes through the sequence's rows, in a decode
step a single one. Sequences with many rows go through the rule in chunks, by the trainer's kernels. Which rows are
whose is data: a step may mix decoding with parts of prompts and be a CUDA graph. A gated short convolution is the first
kernel alone, with gates before and after it instead of an activation.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.chunk_plan import CHUNK_SIZE, MIN_CHUNK_ROWS, round_up_width
from ramify.model.kernels.cuda.delta_rule import continue_tracks
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
    value = tl.load(pointers + (2 * CHANNELS if GATED else 0), mask=mask, other=0.0)
    if GATED:
        gate = tl.load(pointers, mask=mask, other=0.0)
        value = (gate.to(tl.float32) * value.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _apply_rule(
    MIXED, PROJECTED, LOG_RATE, STEP_BIAS, STATES, OUT, START, STOP, SLOT, row_stride, slot_stride, first_strength,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, CHUNK_ROWS: tl.constexpr,
):  # fmt: skip
    """Go through the rows of a sequence with a part of a head's state, of which the values are columns.

    Sequences with CHUNK_ROWS rows or more are left to the chunks.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(START + sequence), tl.load(STOP + sequence)
    if (start < stop) & (stop - start < CHUNK_ROWS):
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
            step = _softplus(tl.load(numbers + HEADS).to(tl.float32) + bias)
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
            k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
            state *= tl.exp(-rate * step)
            added = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * strength
            state += k[:, None] * added[None, :]
            out = tl.sum(state * q[:, None], 0)
            target = OUT + (tl.cast(row, tl.int64) * HEADS + head) * OUT_DIM + value
            tl.store(target, out.to(OUT.dtype.element_ty), mask=is_value)
        tl.store(pointers, state, mask=mask)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _split_chunk(
    MIXED, PROJECTED, LOG_RATE, STEP_BIAS, CHUNKS, QUERY, KEY, VALUE, LOG_DECAY, STRENGTH, row_stride, first_strength,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Write a head's normalized query and key, its value, log decay and strength at each row of a chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(CHUNKS + 3 * chunk) + tl.arange(0, C)
    is_row, row = row < tl.load(CHUNKS + 3 * chunk + 1), row.to(tl.int64)
    mixed = MIXED + row[:, None] * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
    if head < KEY_HEADS:
        column = tl.arange(0, K)[None, :]
        offsets, mask = (row[:, None] * KEY_HEADS + head) * K + column, is_row[:, None] & (column < KEY_DIM)
        q = tl.load(mixed + head * KEY_DIM + column, mask=mask, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 1) + EPS)[:, None]
        tl.store(QUERY + offsets, q.to(QUERY.dtype.element_ty), mask=is_row[:, None])
        k = tl.load(mixed + (KEY_HEADS + head) * KEY_DIM + column, mask=mask, other=0.0).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
        tl.store(KEY + offsets, k.to(KEY.dtype.element_ty), mask=is_row[:, None])
    column = tl.arange(0, V)[None, :]
    source = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    v = tl.load(source, mask=is_row[:, None] & (column < VALUE_DIM), other=0.0)
    tl.store(VALUE + (row[:, None] * HEADS + head) * V + column, v, mask=is_row[:, None])
    numbers = PROJECTED + row * row_stride + first_strength + head
    strength = tl.sigmoid(tl.load(numbers, mask=is_row, other=0.0).to(tl.float32))
    bias, log_rate = tl.load(STEP_BIAS + head).to(tl.float32), tl.load(LOG_RATE + head).to(tl.float32)
    step = _softplus(tl.load(numbers + HEADS, mask=is_row, other=0.0).to(tl.float32) + bias)
    tl.store(STRENGTH + row * HEADS + head, strength, mask=is_row)
    tl.store(LOG_DECAY + row * HEADS + head, -tl.exp(log_rate) * step, mask=is_row)


@triton.jit
def _norm_and_gate(
    X, PROJECTED, WEIGHT, row_stride, first_gate,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, X_DIM: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Normalize each head of a row in place, and multiply it by SiLU of its gate."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    value = tl.arange(0, VALUES)[None, :]
    mask, pointers = (head < HEADS) & (value < VALUE_DIM), X + (row * HEADS + head) * X_DIM + value
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    gates = PROJECTED + row * row_stride + first_gate
    gate = tl.load(gates + head * VALUE_DIM + value, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + value, mask=value < VALUE_DIM, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + EPS)[:, None] * weight * gate / (1 + tl.exp(-gate))
    tl.store(pointers, x.to(X.dtype.element_ty), mask=mask)


# -- operators -------------------------------------------------------------------------------------------------------


def compute_recurrent_layer(
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
    width_out = round_up_width(value_dim)
    out = torch.empty(rows, heads, width_out, dtype=projected.dtype, device=projected.device)
    bounds = sequences.start, sequences.stop, sequences.state_slot
    row_stride, first_gate = projected.stride(0), len(weights.conv)
    values = min(VALUES_PER_PROGRAM, triton.next_power_of_2(value_dim))
    _apply_rule[(len(sequences.start), heads, triton.cdiv(value_dim, values))](
        mixed, projected, weights.log_rate, weights.step_bias, matrices, out, *bounds, row_stride, matrices.stride(0),
        first_gate + heads * value_dim,
        HEADS=heads, KEY_HEADS=weights.key_heads, KEY_DIM=weights.key_dim, VALUE_DIM=value_dim, OUT_DIM=width_out,
        KEYS=triton.next_power_of_2(weights.key_dim), VALUES=values, EPS=KEY_NORM_EPS, SCALE=weights.key_dim**-0.5,
        CHUNK_ROWS=MIN_CHUNK_ROWS, num_warps=4,
    )  # fmt: skip
    if len(sequences.chunks):
        _apply_rule_to_chunks(weights, mixed, projected, sequences, matrices, out)
    _norm_and_gate[(rows, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        out, projected, weights.norm, row_stride, first_gate, HEADS=heads, VALUE_DIM=value_dim, X_DIM=width_out,
        VALUES=triton.next_power_of_2(value_dim), TILE=HEADS_PER_PROGRAM, EPS=eps, num_warps=4,
    )  # fmt: skip
    return out[..., :value_dim].flatten(1)  # a copy only of padded heads


def _apply_rule_to_chunks(
    weights: DeltaRuleWeights,
    mixed: Tensor,
    projected: Tensor,
    sequences: StepSequences,
    matrices: Tensor,
    out: Tensor,
) -> None:
    """Write the outputs of the long sequences, [rows, heads, padded value_dim], and change their matrices."""
    rows, heads, key_heads, value = len(mixed), weights.heads, weights.key_heads, torch.empty_like(out)
    query, key = (mixed.new_empty(rows, key_heads, round_up_width(weights.key_dim)) for _ in range(2))
    log_decay, strength = (mixed.new_empty(rows, heads, dtype=torch.float32) for _ in range(2))
    parts = query, key, value, log_decay, strength
    _split_chunk[(heads, len(sequences.chunks))](
        mixed, projected, weights.log_rate, weights.step_bias, sequences.chunks, *parts,
        projected.stride(0), sum(weights.widths[:2]),
        HEADS=heads, KEY_HEADS=key_heads, KEY_DIM=weights.key_dim, VALUE_DIM=weights.value_dim,
        K=key.shape[2], V=value.shape[2], C=CHUNK_SIZE, EPS=KEY_NORM_EPS, num_warps=8,
    )  # fmt: skip
    continue_tracks(*parts, sequences.chunks, sequences.tracks, matrices, out, CHUNK_SIZE, weights.key_dim**-0.5)
