"""The gated delta rule and gated linear attention over a forest on CUDA: Triton kernels on chunks and tracks.

The formulas are in docs/design/recurrent-forests.md, with the same letters. All kernels but two compute one chunk of
one head per program, for all chunks at once. `_pass_states` takes the state of a head along a track, chunk by chunk,
and `_pass_gradients` its gradient backwards; they are launched once for each round of tracks, and a program owns some
columns of the state. No two programs add to the same memory, so gradients are bitwise reproducible.

A chunk may repeat the tokens before a fork, so kernels work on rows. A row reads the inputs of its token, and one row
of a token writes its output. The gradients of inputs are summed over the rows of each token, in a fixed order.

The engine's prompts are tracks, too: each begins with the state in its request's slot and leaves its last state there
(`continue_tracks`).

Gated linear attention has no strengths, so T, U and W are missing, and N is v. The kernels get None in their place and
leave out what depends on them; two are not launched.

The forward pass saves the inverse of each chunk's triangular system; the states before the chunks are computed again in
the backward pass. Products of bfloat16 are accumulated in float32, and the state that is passed on is float32.
"""
# ruff: noqa: ANN001, ANN202, N803, N806 - of kernels, whose arguments are pointers and constants

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.cuda.row_sums import sum_rows

# Columns of a state that a program computes at a time, warps, and stages of its loops; for elements of two bytes. With
# two stages, the gradients of the last two differ from run to run.
LAUNCH_OPTIONS = {
    "_solve": (0, 4, 1),
    "_transform": (64, 4, 2),
    "_pass_states": (32, 4, 2),
    "_compute_outputs": (64, 4, 2),
    "_backward_outputs": (64, 4, 2),
    "_pass_gradients": (32, 4, 2),
    "_backward_states": (64, 4, 1),
    "_backward_system": (64, 4, 1),
}


# -- parts of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _list_rows(ROWS, start, stop, C: tl.constexpr):
    """Return the rows of a chunk, the mask of those before its end, and their tokens: the same without ROWS."""
    row = start + tl.arange(0, C)
    is_row = row < stop
    return row, is_row, (row if ROWS is None else tl.load(ROWS + row, mask=is_row, other=0))


@triton.jit
def _writes_output(OUTPUT_ROWS, row, token, is_row):
    """Return the mask of the rows that write the outputs of their tokens: all without OUTPUT_ROWS."""
    return is_row if OUTPUT_ROWS is None else is_row & (tl.load(OUTPUT_ROWS + token, mask=is_row, other=-1) == row)


@triton.jit
def _row_offsets(row, head, column, HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    return row.to(tl.int64)[:, None] * (HEADS * D) + head * D + column + tl.arange(0, W)[None, :]


@triton.jit
def _load_rows(X, row, is_row, head, column, HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Return columns of a head in rows, or tokens, [C, W]; zeros where `is_row` is false."""
    return tl.load(X + _row_offsets(row, head, column, HEADS, D, W), mask=is_row[:, None], other=0.0)


@triton.jit
def _store_rows(X, value, row, is_row, head, column, HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    offsets = _row_offsets(row, head, column, HEADS, D, W)
    tl.store(X + offsets, value.to(X.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _load_scalars(X, row, is_row, head, HEADS: tl.constexpr):
    """Return the number of a head in rows, or tokens, [C]; zeros where `is_row` is false."""
    return tl.load(X + row * HEADS + head, mask=is_row, other=0.0)


@triton.jit
def _load_decay(DECAY, start, stop, head, HEADS: tl.constexpr, C: tl.constexpr):
    """Return G of a head at each row of a chunk, [C]. Behind the chunk it stays the same: 0 could make D overflow."""
    row = tl.minimum(start + tl.arange(0, C), tl.maximum(stop - 1, 0))  # an added row of the table is empty
    return tl.load(DECAY + row * HEADS + head)


@triton.jit
def _state_offsets(index, head, column, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr):
    """Return the offsets of columns of a head's state, [K, W], in a tensor [..., heads, K, V]."""
    first = (index.to(tl.int64) * HEADS + head) * (K * V) + column
    return first + tl.arange(0, K)[:, None] * V + tl.arange(0, W)[None, :]


@triton.jit
def _fork_offsets(
    index, head, column, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a head's state columns, [K, W], at a fork or, with SLOT_STRIDE, in a slot.

    Padded elements of a slot have offset -1.
    """
    if SLOT_STRIDE == 0:
        offsets = _state_offsets(index, head, column, HEADS, K, V, W)
    else:
        row, own_column = tl.arange(0, K)[:, None], column + tl.arange(0, W)[None, :]
        first = index.to(tl.int64) * SLOT_STRIDE + head * (KEY_DIM * VALUE_DIM)
        offsets = tl.where((row < KEY_DIM) & (own_column < VALUE_DIM), first + row * VALUE_DIM + own_column, -1)
    return offsets


@triton.jit
def _pair_decay(decay, C: tl.constexpr):
    """Return the decay between each pair of tokens of a chunk; 0 for later keys."""
    index = tl.arange(0, C)
    is_past = index[:, None] >= index[None, :]
    return tl.where(is_past, tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0)), 0.0)


@triton.jit
def _transposed_pair_decay(decay, C: tl.constexpr):
    """Return the transpose of `_pair_decay`: rows are keys, columns are queries; 0 for earlier queries."""
    index = tl.arange(0, C)
    is_later = index[:, None] <= index[None, :]
    return tl.where(is_later, tl.exp(tl.where(is_later, decay[None, :] - decay[:, None], 0.0)), 0.0)


@triton.jit
def _invert(system, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + `system`, which is strictly lower triangular.

    Blocks on the diagonal are inverted row by row, all at once. With their inverse E and X = E·(the other blocks),
    the result is (I + X)⁻¹·E, and X to the number of blocks is zero.
    """
    N: tl.constexpr = C // B
    block = tl.arange(0, N)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(system, [N, B, N, B])
    diagonal = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)  # [N, B, B]
    row = tl.arange(0, B)
    inverse = tl.where(row[None, :, None] == row[None, None, :], 1.0, tl.zeros([N, B, B], tl.float32))
    for index in range(1, B):
        is_row = row[None, :, None] == index
        factors = tl.sum(tl.where(is_row, diagonal, 0.0), 1)  # [N, B]
        update = tl.sum(factors[:, :, None] * inverse, 1)  # [N, B]; later rows have factors 0
        inverse -= tl.where(is_row, update[:, None, :], 0.0)
    wide = tl.where(on_diagonal, inverse[:, :, None, :], tl.zeros([N, B, N, B], tl.float32))
    result = tl.reshape(wide, [C, C])
    index = tl.arange(0, C)
    if N > 1:
        others = tl.where(index[:, None] // B > index[None, :] // B, system, 0.0)
        identity = tl.where(index[:, None] == index[None, :], 1.0, tl.zeros([C, C], tl.float32))
        power = -tl.dot(result, others, input_precision=PRECISION)
        series = identity + power
        if N > 2:
            power = tl.dot(power, power, input_precision=PRECISION)
            series = tl.dot(series, identity + power, input_precision=PRECISION)
        result = tl.dot(series, result, input_precision=PRECISION)
    return result


# -- kernels of the forward pass -------------------------------------------------------------------------------------


@triton.jit
def _solve(
    KEY, LOG_DECAY, STRENGTH, ROWS, CHUNKS, DECAY, INVERSE,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute G, the running sum of log decays, and with STRENGTH also T, the inverse of the triangular system."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    decay = tl.cumsum(_load_scalars(LOG_DECAY, token, is_row, head, HEADS), 0)
    tl.store(DECAY + row * HEADS + head, decay, mask=is_row)
    if STRENGTH is not None:
        strength = _load_scalars(STRENGTH, token, is_row, head, HEADS)
        key = _load_rows(KEY, token, is_row, head // (HEADS // KEY_HEADS), 0, KEY_HEADS, K, K)
        index = tl.arange(0, C)
        system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * _pair_decay(decay, C) * strength[:, None]
        system = tl.where(index[:, None] > index[None, :], system, 0.0)
        inverse = _invert(system, C, 16, SOLVE_PRECISION)
        _store_rows(INVERSE, inverse, row, is_row, head, 0, HEADS, C, C)


@triton.jit
def _transform(
    KEY, VALUE, DECAY, STRENGTH, INVERSE, ROWS, CHUNKS, U, W,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute U = T(b·v) and W = T(b·exp(G)·k)."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    inverse = _load_rows(INVERSE, row, is_row, head, 0, HEADS, C, C)
    strength = _load_scalars(STRENGTH, token, is_row, head, HEADS)
    decay = _load_decay(DECAY, start, stop, head, HEADS, C)
    key = _load_rows(KEY, token, is_row, head // (HEADS // KEY_HEADS), 0, KEY_HEADS, K, K)
    scaled = (key * (strength * tl.exp(decay))[:, None]).to(key.dtype)
    w = tl.dot(inverse, scaled, input_precision=PRECISION)
    _store_rows(W, w, row, is_row, head, 0, HEADS, K, K)
    for column in range(0, V, BV):
        value = _load_rows(VALUE, token, is_row, head, column, HEADS, V, BV)
        u = tl.dot(inverse, (value * strength[:, None]).to(value.dtype), input_precision=PRECISION)
        _store_rows(U, u, row, is_row, head, column, HEADS, V, BV)


@triton.jit
def _pass_states(
    KEY, U, W, DECAY, ROWS, CHUNKS, TRACK_CHUNKS, TRACKS, STATES, NEW, FORK_STATES, first_track,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Take columns of a head's state along a track: store S₀ and N of each chunk, and the state at each fork.

    Without W, U holds the values of tokens.
    In the engine, a track has adjacent chunks, and forks are slots of KEY_DIM x VALUE_DIM states, SLOT_STRIDE apart.
    """
    column, head, track = tl.program_id(0) * BV, tl.program_id(1), first_track + tl.program_id(2)
    fork = tl.load(TRACKS + 3 * track + 2)
    offsets = _fork_offsets(tl.maximum(fork, 0), head, column, HEADS, K, V, BV, SLOT_STRIDE, KEY_DIM, VALUE_DIM)
    state = tl.load(FORK_STATES + offsets, mask=(fork >= 0) & (offsets >= 0), other=0.0)
    for index in range(tl.load(TRACKS + 3 * track), tl.load(TRACKS + 3 * track + 1)):
        chunk = index if TRACK_CHUNKS is None else tl.load(TRACK_CHUNKS + index)
        start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
        row, is_row, token = _list_rows(ROWS, start, stop, C)
        narrow = state.to(STATES.dtype.element_ty)
        tl.store(STATES + _state_offsets(chunk, head, column, HEADS, K, V, BV), narrow)
        if W is not None:
            w = _load_rows(W, row, is_row, head, 0, HEADS, K, K)
            new = _load_rows(U, row, is_row, head, column, HEADS, V, BV)
            new = new.to(tl.float32) - tl.dot(w, narrow, input_precision=PRECISION)
        else:
            new = _load_rows(U, token, is_row, head, column, HEADS, V, BV).to(tl.float32)
        _store_rows(NEW, new, row, is_row, head, column, HEADS, V, BV)
        decay = _load_decay(DECAY, start, stop, head, HEADS, C)
        last = tl.load(DECAY + (stop - 1) * HEADS + head)
        key = _load_rows(KEY, token, is_row, head // (HEADS // KEY_HEADS), 0, KEY_HEADS, K, K)
        remaining = (new * tl.exp(tl.minimum(last - decay, 0.0))[:, None]).to(key.dtype)
        state = tl.dot(tl.trans(key), remaining, state * tl.exp(last), input_precision=PRECISION)
        own_fork = tl.load(CHUNKS + 3 * chunk + 2)
        if own_fork >= 0:
            offsets = _fork_offsets(own_fork, head, column, HEADS, K, V, BV, SLOT_STRIDE, KEY_DIM, VALUE_DIM)
            if SLOT_STRIDE == 0:
                tl.store(FORK_STATES + offsets, state)
            else:
                tl.store(FORK_STATES + offsets, state, mask=offsets >= 0)


@triton.jit
def _compute_outputs(
    QUERY, KEY, NEW, DECAY, STATES, ROWS, OUTPUT_ROWS, CHUNKS, OUT, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    writes_output = _writes_output(OUTPUT_ROWS, row, token, is_row)
    key_head = head // (HEADS // KEY_HEADS)
    query = _load_rows(QUERY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    key = _load_rows(KEY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    decay = _load_decay(DECAY, start, stop, head, HEADS, C)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * _pair_decay(decay, C)
    scores = scores.to(query.dtype)
    for column in range(0, V, BV):
        state = tl.load(STATES + _state_offsets(chunk, head, column, HEADS, K, V, BV))
        new = _load_rows(NEW, row, is_row, head, column, HEADS, V, BV)
        out = tl.dot(query, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
        out = tl.dot(scores, new, out, input_precision=PRECISION) * scale
        _store_rows(OUT, out, token, writes_output, head, column, HEADS, V, BV)


# -- kernels of the backward pass ------------------------------------------------------------------------------------


@triton.jit
def _backward_outputs(
    QUERY, KEY, DECAY, GRAD, ROWS, OUTPUT_ROWS, CHUNKS, D_NEW, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the part of the gradient of N that comes from the outputs of the same chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    writes_output = _writes_output(OUTPUT_ROWS, row, token, is_row)
    key_head = head // (HEADS // KEY_HEADS)
    query = _load_rows(QUERY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    key = _load_rows(KEY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    decay = _load_decay(DECAY, start, stop, head, HEADS, C)
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * _transposed_pair_decay(decay, C) * scale
    scores = scores.to(query.dtype)
    for column in range(0, V, BV):
        grad = _load_rows(GRAD, token, writes_output, head, column, HEADS, V, BV)
        d_new = tl.dot(scores, grad, input_precision=PRECISION)
        _store_rows(D_NEW, d_new, row, is_row, head, column, HEADS, V, BV)


@triton.jit
def _pass_gradients(
    QUERY, KEY, W, DECAY, GRAD, ROWS, OUTPUT_ROWS, CHUNKS, TRACK_CHUNKS, TRACKS, FORK_TRACKS, D_STATES, D_NEW, D_STARTS,
    first_track, num_roots, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the gradient of the state back along a track, and add at each fork what the other tracks have left there.

    Store the gradient of the state after each chunk, the gradient of N, and the gradient of the track's first state.
    """
    column, head, track = tl.program_id(0) * BV, tl.program_id(1), first_track + tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first, last_index = tl.load(TRACKS + 3 * track), tl.load(TRACKS + 3 * track + 1) - 1
    d_state = tl.zeros([K, BV], tl.float32)
    for step in range(last_index + 1 - first):
        chunk = tl.load(TRACK_CHUNKS + last_index - step)
        start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
        row, is_row, token = _list_rows(ROWS, start, stop, C)
        writes_output = _writes_output(OUTPUT_ROWS, row, token, is_row)
        fork = tl.load(CHUNKS + 3 * chunk + 2)
        if fork >= 0:
            for branch in range(tl.load(FORK_TRACKS + fork), tl.load(FORK_TRACKS + fork + 1)):
                d_state += tl.load(D_STARTS + _state_offsets(branch - num_roots, head, column, HEADS, K, V, BV))
        narrow = d_state.to(D_STATES.dtype.element_ty)
        tl.store(D_STATES + _state_offsets(chunk, head, column, HEADS, K, V, BV), narrow)
        decay = _load_decay(DECAY, start, stop, head, HEADS, C)
        last = tl.load(DECAY + (stop - 1) * HEADS + head)
        key = _load_rows(KEY, token, is_row, key_head, 0, KEY_HEADS, K, K)
        d_new = tl.dot(key, narrow, input_precision=PRECISION) * tl.exp(tl.minimum(last - decay, 0.0))[:, None]
        d_new += _load_rows(D_NEW, row, is_row, head, column, HEADS, V, BV).to(tl.float32)
        d_new = d_new.to(key.dtype)
        _store_rows(D_NEW, d_new, row, is_row, head, column, HEADS, V, BV)
        query = _load_rows(QUERY, token, is_row, key_head, 0, KEY_HEADS, K, K)
        grad = _load_rows(GRAD, token, writes_output, head, column, HEADS, V, BV)
        if W is not None:
            w = _load_rows(W, row, is_row, head, 0, HEADS, K, K)
        grad = (grad * (tl.exp(decay) * scale)[:, None]).to(key.dtype)
        d_state = tl.dot(tl.trans(query), grad, d_state * tl.exp(last), input_precision=PRECISION)
        if W is not None:
            d_state -= tl.dot(tl.trans(w), d_new, input_precision=PRECISION)  # pyrefly: ignore[unbound-name]
    if tl.load(TRACKS + 3 * track + 2) >= 0:
        tl.store(D_STARTS + _state_offsets(track - num_roots, head, column, HEADS, K, V, BV), d_state)


@triton.jit
def _backward_states(
    QUERY, KEY, NEW, DECAY, STATES, GRAD, D_STATES, D_NEW, ROWS, OUTPUT_ROWS, CHUNKS,
    D_QUERY, D_KEY, D_W, D_DECAY, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries and W, and the gradients of keys and G but for what comes through T.

    Without D_W nothing comes through T, and D_DECAY gets the gradient of log decays.
    """
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    writes_output = _writes_output(OUTPUT_ROWS, row, token, is_row)
    key_head, index = head // (HEADS // KEY_HEADS), tl.arange(0, C)
    d_query, d_key, d_w = tl.zeros([C, K], tl.float32), tl.zeros([C, K], tl.float32), tl.zeros([C, K], tl.float32)
    state_product = 0.0
    for column in range(0, V, BV):
        state = tl.load(STATES + _state_offsets(chunk, head, column, HEADS, K, V, BV))
        d_state = tl.load(D_STATES + _state_offsets(chunk, head, column, HEADS, K, V, BV))
        grad = _load_rows(GRAD, token, writes_output, head, column, HEADS, V, BV)
        new = _load_rows(NEW, row, is_row, head, column, HEADS, V, BV)
        if D_W is not None:
            d_new = _load_rows(D_NEW, row, is_row, head, column, HEADS, V, BV)
        d_query = tl.dot(grad, tl.trans(state), d_query, input_precision=PRECISION)
        d_key = tl.dot(new, tl.trans(d_state), d_key, input_precision=PRECISION)
        if D_W is not None:
            d_w = tl.dot(d_new, tl.trans(state), d_w, input_precision=PRECISION)  # pyrefly: ignore[unbound-name]
        state_product += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
    if D_W is not None:
        _store_rows(D_W, -d_w, row, is_row, head, 0, HEADS, K, K)
    query = _load_rows(QUERY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    key = _load_rows(KEY, token, is_row, key_head, 0, KEY_HEADS, K, K)
    decay = _load_decay(DECAY, start, stop, head, HEADS, C)
    last = tl.load(DECAY + tl.maximum(stop - 1, 0) * HEADS + head)  # an added row of the table is empty
    # outputs through S₀, and the state after the chunk
    d_query = d_query * (tl.exp(decay) * scale)[:, None]
    d_decay = tl.sum(d_query * query.to(tl.float32), 1)
    d_key = d_key * tl.exp(tl.minimum(last - decay, 0.0))[:, None]
    key_product = tl.sum(d_key * key.to(tl.float32), 1)
    d_decay += tl.where(start + index == stop - 1, tl.sum(key_product) + state_product * tl.exp(last), 0.0)
    d_decay -= key_product
    # Outputs through the scores within the chunk, after W's gradient has left its registers. For the transpose see
    # `_backward_system`.
    d_scores, d_scores_t = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        grad = _load_rows(GRAD, token, writes_output, head, column, HEADS, V, BV)
        new = _load_rows(NEW, row, is_row, head, column, HEADS, V, BV)
        d_scores = tl.dot(grad, tl.trans(new), d_scores, input_precision=PRECISION)
        d_scores_t = tl.dot(new, tl.trans(grad), d_scores_t, input_precision=PRECISION)
    d_scores = d_scores * _pair_decay(decay, C) * scale
    d_scores_t = d_scores_t * _transposed_pair_decay(decay, C) * scale
    products = d_scores * tl.dot(query, tl.trans(key), input_precision=PRECISION)
    d_decay += tl.sum(products, 1) - tl.sum(products, 0)
    d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision=PRECISION)
    d_key = tl.dot(d_scores_t.to(key.dtype), query, d_key, input_precision=PRECISION)
    _store_rows(D_QUERY, d_query, row, is_row, head, 0, HEADS, K, K)
    _store_rows(D_KEY, d_key, row, is_row, head, 0, HEADS, K, K)
    if D_W is None:
        d_decay = tl.sum(d_decay) - tl.cumsum(d_decay, 0) + d_decay
    tl.store(D_DECAY + row * HEADS + head, d_decay, mask=is_row)


@triton.jit
def _backward_system(
    KEY, VALUE, U, W, DECAY, STRENGTH, INVERSE, D_NEW, D_W, D_KEY_STATES, D_DECAY, ROWS, CHUNKS,
    D_KEY, D_VALUE, D_LOG_DECAY, D_STRENGTH,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the gradients of U and W through the triangular system, and add what `_backward_states` has left."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(CHUNKS + 3 * chunk), tl.load(CHUNKS + 3 * chunk + 1)
    row, is_row, token = _list_rows(ROWS, start, stop, C)
    index = tl.arange(0, C)
    inverse = _load_rows(INVERSE, row, is_row, head, 0, HEADS, C, C)
    strength = _load_scalars(STRENGTH, token, is_row, head, HEADS)
    d_strength = tl.zeros([C], tl.float32)
    # The gradient of the system is -Tᵀ·`product`. Its transpose is computed separately: Triton 3.4 to 3.7 compile
    # `tl.trans` of a computed product to wrong code for Hopper.
    product, product_t = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        d_new = _load_rows(D_NEW, row, is_row, head, column, HEADS, V, BV)
        u = _load_rows(U, row, is_row, head, column, HEADS, V, BV)
        product = tl.dot(d_new, tl.trans(u), product, input_precision=PRECISION)
        product_t = tl.dot(u, tl.trans(d_new), product_t, input_precision=PRECISION)
        d_right = tl.dot(tl.trans(inverse), d_new, input_precision=PRECISION)  # the gradient of b·v
        value = _load_rows(VALUE, token, is_row, head, column, HEADS, V, BV)
        d_strength += tl.sum(d_right * value.to(tl.float32), 1)
        _store_rows(D_VALUE, d_right * strength[:, None], row, is_row, head, column, HEADS, V, BV)
    w = _load_rows(W, row, is_row, head, 0, HEADS, K, K)
    d_w = _load_rows(D_W, row, is_row, head, 0, HEADS, K, K)
    product = tl.dot(d_w, tl.trans(w), product, input_precision=PRECISION)
    product_t = tl.dot(w, tl.trans(d_w), product_t, input_precision=PRECISION)
    d_right = tl.dot(tl.trans(inverse), d_w, input_precision=PRECISION)  # the gradient of b·exp(G)·k
    d_system = tl.dot(tl.trans(inverse), product.to(inverse.dtype), input_precision=PRECISION)
    d_system_t = tl.dot(product_t.to(inverse.dtype), inverse, input_precision=PRECISION)
    decay = _load_decay(DECAY, start, stop, head, HEADS, C)
    d_system = -tl.where(index[:, None] > index[None, :], d_system * _pair_decay(decay, C), 0.0)
    d_system_t = -tl.where(index[:, None] < index[None, :], d_system_t * _transposed_pair_decay(decay, C), 0.0)
    key = _load_rows(KEY, token, is_row, head // (HEADS // KEY_HEADS), 0, KEY_HEADS, K, K)
    growth = tl.exp(decay)
    through_w = tl.sum(d_right * key.to(tl.float32), 1) * growth
    d_strength += through_w
    d_decay = through_w * strength + _load_scalars(D_DECAY, row, is_row, head, HEADS)
    d_key = _load_rows(D_KEY_STATES, row, is_row, head, 0, HEADS, K, K).to(tl.float32)
    d_key += d_right * (strength * growth)[:, None]
    products = d_system * tl.dot(key, tl.trans(key), input_precision=PRECISION)
    d_strength += tl.sum(products, 1)
    products = products * strength[:, None]
    d_decay += tl.sum(products, 1) - tl.sum(products, 0)
    d_key = tl.dot((d_system * strength[:, None]).to(key.dtype), key, d_key, input_precision=PRECISION)
    d_key = tl.dot((d_system_t * strength[None, :]).to(key.dtype), key, d_key, input_precision=PRECISION)
    _store_rows(D_KEY, d_key, row, is_row, head, 0, HEADS, K, K)
    d_log_decay = tl.sum(d_decay) - tl.cumsum(d_decay, 0) + d_decay
    tl.store(D_LOG_DECAY + row * HEADS + head, d_log_decay, mask=is_row)
    tl.store(D_STRENGTH + row * HEADS + head, d_strength, mask=is_row)


# -- operators -------------------------------------------------------------------------------------------------------

RowTables = tuple[Tensor, Tensor] | tuple[None, None]  # `rows` and `output_rows` of `gated_delta_rule_op`
NO_REPEATS: RowTables = (None, None)  # the rows are the tokens


@torch.library.custom_op("ramify::gated_delta_rule", mutates_args=())
def gated_delta_rule_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor | None,
    rows: Tensor,
    output_rows: Tensor,
    token_rows: Tensor,
    first_rows: Tensor,
    chunks: Tensor,
    track_chunks: Tensor,
    tracks: Tensor,
    fork_tracks: Tensor,
    rounds: Tensor,
    chunk_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, and G and T of rows for the backward pass. Widths of heads are powers of two, at least 64.

    Without `strength` it is gated linear attention, and T is empty.
    `rows` [rows] are the tokens of the chunks' rows, `output_rows` [tokens] the rows with the outputs, `token_rows`
    [rows] the rows of each token, and `first_rows` [tokens + 1] where they begin. `chunks` [chunks, 3] are start, stop
    and fork of each chunk, `track_chunks` the chunks of all tracks, `tracks` [tracks, 3] where a track begins and ends
    in them, and its fork, `fork_tracks` [forks + 1] the first track of each fork, and `rounds` [rounds + 1], on the
    CPU, the first track of each round.
    """
    out, fork_states = torch.empty_like(value), _new_fork_states(query, value, fork_tracks)
    inputs, tables = (query, key, value, log_decay, strength), (chunks, track_chunks, tracks)
    row_tables = (rows, output_rows) if len(rows) > len(value) else NO_REPEATS
    decay, inverse = _compute_tracks(
        *inputs, *tables, fork_states, rounds.tolist(), out, chunk_size, scale, row_tables=row_tables
    )
    return out, decay, inverse


def continue_tracks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    chunks: Tensor,
    tracks: Tensor,
    states: Tensor,
    out: Tensor,
    chunk_size: int,
    scale: float,
) -> None:
    """Write the outputs of sequences, whose `states` [slots, heads, key_dim, value_dim] change in place.

    `chunks` and `tracks` have slots in place of forks (see `StepSequences`). Heads of queries, keys, values and outputs
    have the widths of `round_up_width`, padded with zeros; the heads of a state have their own.
    """
    tables = chunks, None, tracks
    bounds = [0, len(tracks)]
    slots = {"SLOT_STRIDE": states.stride(0), "KEY_DIM": states.shape[2], "VALUE_DIM": states.shape[3]}
    _compute_tracks(query, key, value, log_decay, strength, *tables, states, bounds, out, chunk_size, scale, slots)


def _compute_tracks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor | None,
    chunks: Tensor,
    track_chunks: Tensor | None,
    tracks: Tensor,
    fork_states: Tensor,
    bounds: list[int],
    out: Tensor,
    chunk_size: int,
    scale: float,
    slots: dict[str, int] | None = None,
    row_tables: RowTables = NO_REPEATS,
) -> tuple[Tensor, Tensor]:
    """Write the outputs of all tracks; return G and T. `bounds` are the first track of each round, and their number."""
    sizes, (rows, _) = _get_sizes(query, value, chunk_size), row_tables
    grid, num_rows = (sizes["HEADS"], len(chunks)), len(value if rows is None else rows)
    decay = log_decay.new_empty(num_rows, grid[0])
    inverse = value.new_empty(_get_inverse_shape(decay, strength, chunk_size))
    _solve[grid](key, log_decay, strength, rows, chunks, decay, inverse, **_get_constants("_solve", sizes, value))
    tables = chunks, track_chunks, tracks
    states, new, _, _ = _compute_states(
        key, value, decay, strength, inverse, rows, *tables, fork_states, bounds, sizes, slots
    )
    constants = _get_constants("_compute_outputs", sizes, value)
    _compute_outputs[grid](query, key, new, decay, states, *row_tables, chunks, out, scale, **constants)
    return decay, inverse


def _compute_states(
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor | None,
    inverse: Tensor,
    rows: Tensor | None,
    chunks: Tensor,
    track_chunks: Tensor | None,
    tracks: Tensor,
    fork_states: Tensor,
    bounds: list[int],
    sizes: dict[str, int],
    slots: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return S₀ of each chunk, and N, U and W of each row; without strengths, the values of tokens and None."""
    heads, key_dim, value_dim = sizes["HEADS"], sizes["K"], sizes["V"]
    new, u, w = value.new_empty(len(decay), heads, value_dim), value, None
    if strength is not None:
        u, w = torch.empty_like(new), value.new_empty(len(decay), heads, key_dim)
        constants = _get_constants("_transform", sizes, value)
        _transform[heads, len(chunks)](key, value, decay, strength, inverse, rows, chunks, u, w, **constants)
    states = value.new_empty(len(chunks), heads, key_dim, value_dim)
    constants = _get_constants("_pass_states", sizes, value)
    constants |= slots or {"SLOT_STRIDE": 0, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    for first, stop in pairwise(bounds):
        _pass_states[value_dim // constants["BV"], heads, stop - first](
            key, u, w, decay, rows, chunks, track_chunks, tracks, states, new, fork_states, first, **constants
        )
    return states, new, u, w


def _new_fork_states(query: Tensor, value: Tensor, fork_tracks: Tensor) -> Tensor:
    return value.new_empty(len(fork_tracks), value.shape[1], query.shape[2], value.shape[2], dtype=torch.float32)


@torch.library.custom_op("ramify::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor | None,
    inverse: Tensor,
    rows: Tensor,
    output_rows: Tensor,
    token_rows: Tensor,
    first_rows: Tensor,
    chunks: Tensor,
    track_chunks: Tensor,
    tracks: Tensor,
    fork_tracks: Tensor,
    rounds: Tensor,
    chunk_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs; `grad` is the gradient of each token's output.

    The gradient of strengths is empty if there are none.
    """
    row_tables = (rows, output_rows) if len(rows) > len(value) else NO_REPEATS
    row_tokens, sizes = row_tables[0], _get_sizes(query, value, chunk_size)
    heads, key_heads, value_dim = sizes["HEADS"], sizes["KEY_HEADS"], sizes["V"]
    tables, bounds = (chunks, track_chunks, tracks), rounds.tolist()
    fork_states = _new_fork_states(query, value, fork_tracks)
    states, new, u, w = _compute_states(
        key, value, decay, strength, inverse, row_tokens, *tables, fork_states, bounds, sizes
    )
    d_states, d_new = torch.empty_like(states), torch.empty_like(new)
    constants = _get_constants("_backward_outputs", sizes, value)
    _backward_outputs[heads, len(chunks)](query, key, decay, grad, *row_tables, chunks, d_new, scale, **constants)
    num_roots = bounds[1]
    d_starts = states.new_empty(max(1, len(tracks) - num_roots), *states.shape[1:], dtype=torch.float32)
    constants = _get_constants("_pass_gradients", sizes, value)
    for first, stop in reversed(list(pairwise(bounds))):
        _pass_gradients[value_dim // constants["BV"], heads, stop - first](
            query, key, w, decay, grad, *row_tables, *tables, fork_tracks, d_states, d_new, d_starts,
            first, num_roots, scale, **constants,
        )  # fmt: skip
    d_query, d_key = (value.new_empty(*new.shape[:2], sizes["K"]) for _ in range(2))
    d_w, d_value, d_log_decay, d_strength = None, d_new, torch.empty_like(decay), decay.new_empty(0)
    if w is not None:
        d_w = torch.empty_like(w)
    constants = _get_constants("_backward_states", sizes, value)
    _backward_states[heads, len(chunks)](
        query, key, new, decay, states, grad, d_states, d_new, *row_tables, chunks,
        d_query, d_key, d_w, d_log_decay, scale, **constants,
    )  # fmt: skip
    if strength is not None:
        d_key_states, d_decay = d_key, d_log_decay
        d_key, d_value = torch.empty_like(d_key), torch.empty_like(u)
        d_log_decay, d_strength = torch.empty_like(decay), torch.empty_like(decay)
        constants = _get_constants("_backward_system", sizes, value)
        _backward_system[heads, len(chunks)](
            key, value, u, w, decay, strength, inverse, d_new, d_w, d_key_states, d_decay, row_tokens, chunks,
            d_key, d_value, d_log_decay, d_strength, **constants,
        )  # fmt: skip
    if heads > key_heads:
        d_query, d_key = (tensor.unflatten(1, (key_heads, -1)).sum(2) for tensor in (d_query, d_key))
    if row_tokens is not None:
        grads = d_query, d_key, d_value, d_log_decay
        d_query, d_key, d_value, d_log_decay = (sum_rows(part, token_rows, first_rows) for part in grads)
        d_strength = d_strength if strength is None else sum_rows(d_strength, token_rows, first_rows)
    return d_query, d_key, d_value, d_log_decay, d_strength


def _get_inverse_shape(decay: Tensor, strength: Tensor | None, chunk_size: int) -> tuple[int, ...]:
    """Return the shape of T of all rows."""
    return (0,) if strength is None else (*decay.shape, chunk_size)


def _get_sizes(query: Tensor, value: Tensor, chunk_size: int) -> dict[str, int]:
    """Return the sizes that all kernels are compiled for."""
    (key_heads, key_dim), (heads, value_dim) = query.shape[1:], value.shape[1:]
    return {"HEADS": heads, "KEY_HEADS": key_heads, "K": key_dim, "V": value_dim, "C": chunk_size}


def _get_constants(kernel: str, sizes: dict[str, int], value: Tensor) -> dict[str, Any]:
    """Return the constants and options of a kernel. Wider elements take more registers and shared memory.

    Products of float32 are nearly as precise as in float32, on tensor cores; products of bfloat16 are exact.
    """
    columns, warps, stages = LAUNCH_OPTIONS[kernel]
    is_wide = value.element_size() == 4
    options: dict[str, Any] = {"PRECISION": "tf32x3", "num_warps": warps, "num_stages": 1 if is_wide else stages}
    if kernel == "_solve":
        names = ("HEADS", "KEY_HEADS", "K", "C")
        return {**{name: sizes[name] for name in names}, **options, "SOLVE_PRECISION": "tf32x3" if is_wide else "tf32"}
    return {**sizes, **options, "BV": min(columns // 2 if is_wide else columns, sizes["V"])}


@gated_delta_rule_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None, *rest: Any) -> Any:
    decay = log_decay.new_empty(rest[0].shape[0], value.shape[1])
    return torch.empty_like(value), decay, value.new_empty(_get_inverse_shape(decay, strength, rest[-2]))


@gated_delta_rule_backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Any, *rest: Any) -> Any:
    scalars = decay.new_empty(value.shape[:2])
    d_strength = decay.new_empty(0) if strength is None else torch.empty_like(scalars)
    return *map(torch.empty_like, (query, key, value)), scalars, d_strength


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, strength, *tables, ctx.chunk_size, ctx.scale = inputs
    _, decay, inverse = output
    ctx.mark_non_differentiable(decay, inverse)
    ctx.save_for_backward(query, key, value, decay, strength, inverse, *tables)


def _autograd_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *grads, d_strength = gated_delta_rule_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.chunk_size, ctx.scale)
    return *grads, d_strength if ctx.needs_input_grad[4] else None, *(None,) * 11


gated_delta_rule_op.register_autograd(_autograd_backward, setup_context=_setup_context)
