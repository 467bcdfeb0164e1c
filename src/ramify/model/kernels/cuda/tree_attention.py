"""Tree attention on CUDA: Triton kernels that visit only the blocks in which something is visible.

For each block of queries a list names the blocks of keys that it sees, and for each block of keys a list names the
blocks of queries that see it (`ramify.model.tree_attention.BlockMask`). Fully visible blocks come first in a list and
need no mask. In the forward pass a program owns a block of queries and loops over keys. The backward pass runs two
kernels, one that owns queries and one that owns keys: no two programs add to the same memory, so gradients are
bitwise reproducible. Very long lists are scheduled first, for load balance. Where the shared memory of a GPU does not
hold blocks of wide heads, a program computes a tile of its block, and reads the other blocks tile by tile.

Tensors are contiguous [tokens, heads, width]; scores are in base 2. Lists are read one iteration ahead, so that the
address of the next load is known early. Where it pays, loads in loops go through the Tensor Memory Accelerator (TMA),
which takes the corner of a tile instead of one address per thread (`_tile_descriptor`); on chips without one, Triton
emulates it.

Soft caps and attention sinks (`scores.py`) are compiled in for models that have them. A sink is the first key of every
row, so the log-sum-exp contains it, and the backward kernels do not change.

The running maximum of a row is an integer, so that changing it only shifts exponents: weights are rounded to bfloat16
in the same way whatever came before, and a path gets the same result wherever it is in a pack.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ramify.model.kernels.cuda.scores import LOG2E, MASKED_SCORE, start_sums, tanh

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_header(BLOCK_LISTS, tokens, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the blocks of a program, its own tile, and how many tiles are fully visible, and visible at all."""
    parts: tl.constexpr = BLOCK // TILE
    list_ptr = BLOCK_LISTS + tl.program_id(1) // parts * (tokens // BLOCK + 3)
    tile = tl.load(list_ptr) * parts + tl.program_id(1) % parts
    return list_ptr + 3, tile, tl.load(list_ptr + 1) * parts, tl.load(list_ptr + 2) * parts


@triton.jit
def _load_tile_index(blocks, index, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the tile at a place in a list of blocks."""
    parts: tl.constexpr = BLOCK // TILE
    return tl.load(blocks + index // parts) * parts + index % parts


@triton.jit
def _tile_offset(tile, head, HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Return the offset of the first element of a head in a tile."""
    return tile.to(tl.int64) * (TILE * HEADS * D) + head * D


@triton.jit
def _element_offsets(HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of all elements of a head in a tile, relative to the first."""
    return tl.arange(0, TILE)[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]


@triton.jit
def _tile_descriptor(X, tokens, HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Return a tensor descriptor that loads a tile of a head by the coordinates of its first element."""
    return tl.make_tensor_descriptor(X, [tokens, HEADS * D], [HEADS * D, 1], [TILE, D])


@triton.jit
def _mask_scores(scores, END, POSITION, queries, keys, WINDOW: tl.constexpr):
    """Mask the invisible pairs; queries and keys are a column and a row, or a row and a column."""
    visible = (keys <= queries) & (queries < tl.load(END + keys))
    if WINDOW:
        visible &= tl.load(POSITION + queries) - tl.load(POSITION + keys) < WINDOW
    return tl.where(visible, scores, MASKED_SCORE)


@triton.jit
def _cap_scores(scores, CAP: tl.constexpr):
    """Return the scores with a soft cap, unless it is 0, and the slope of the cap at each."""
    slope = 1.0
    if CAP > 0:
        ratio = tanh(scores * (1 / CAP))
        scores, slope = ratio * CAP, 1 - ratio * ratio
    return scores, slope


@triton.jit
def _forward(
    Q, K, V, SINKS, END, POSITION, BLOCK_LISTS, OUT, LSE, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    blocks, tile, num_full, num_tiles = _load_header(BLOCK_LISTS, tokens, BLOCK, TILE)
    kv_head = head // (HEADS // KV_HEADS)
    queries = tile * TILE + tl.arange(0, TILE)
    own_offsets = _tile_offset(tile, head, HEADS, D, TILE) + _element_offsets(HEADS, D, TILE)
    q = tl.load(Q + own_offsets)
    k_tiles = _tile_descriptor(K, tokens, KV_HEADS, D, TILE)
    v_tiles = _tile_descriptor(V, tokens, KV_HEADS, D, TILE)
    score_unit: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    acc = tl.zeros([TILE, D], tl.float32)
    row_max, row_sum = start_sums(SINKS, tl.full([TILE], head, tl.int32), HAS_SINKS)
    for needs_mask in tl.static_range(2):
        first, last = (num_full, num_tiles) if needs_mask else (0, num_full)
        next_tile = _load_tile_index(blocks, first, BLOCK, TILE)
        for index in range(first, last):
            key_tile, next_index = next_tile, tl.minimum(index + 1, num_tiles - 1)
            next_tile = _load_tile_index(blocks, next_index, BLOCK, TILE)
            k = k_tiles.load([key_tile * TILE, kv_head * D])
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SOFTCAP > 0:
                scores = tanh(scores * (SCALE / SOFTCAP))
            if needs_mask:
                keys = key_tile * TILE + tl.arange(0, TILE)
                scores = _mask_scores(scores, END, POSITION, queries[:, None], keys[None, :], WINDOW)
            new_max = tl.maximum(row_max, tl.ceil(tl.max(scores, 1) * score_unit))
            rescale = tl.exp2(row_max - new_max)
            weight = tl.exp2(scores * score_unit - new_max[:, None])
            row_max, row_sum = new_max, row_sum * rescale + tl.sum(weight, 1)
            v = v_tiles.load([key_tile * TILE, kv_head * D])
            acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    tl.store(OUT + own_offsets, (acc / row_sum[:, None]).to(OUT.dtype.element_ty))
    tl.store(LSE + head * tokens + queries, row_max + tl.log2(row_sum))


@triton.jit
def _backward_queries(
    Q, K, V, END, POSITION, BLOCK_LISTS, OUT, GRAD, LSE, DELTA, D_Q, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    blocks, tile, num_full, num_tiles = _load_header(BLOCK_LISTS, tokens, BLOCK, TILE)
    kv_head = head // (HEADS // KV_HEADS)
    queries = tile * TILE + tl.arange(0, TILE)
    own_offsets = _tile_offset(tile, head, HEADS, D, TILE) + _element_offsets(HEADS, D, TILE)
    kv_offsets = _element_offsets(KV_HEADS, D, TILE)
    q, grad = tl.load(Q + own_offsets), tl.load(GRAD + own_offsets)
    lse = tl.load(LSE + head * tokens + queries)
    delta = tl.sum(tl.load(OUT + own_offsets).to(tl.float32) * grad, 1)
    tl.store(DELTA + head * tokens + queries, delta)
    d_q = tl.zeros([TILE, D], tl.float32)
    for needs_mask in tl.static_range(2):
        first, last = (num_full, num_tiles) if needs_mask else (0, num_full)
        next_tile = _load_tile_index(blocks, first, BLOCK, TILE)
        for index in range(first, last):
            key_tile, next_index = next_tile, tl.minimum(index + 1, num_tiles - 1)
            next_tile = _load_tile_index(blocks, next_index, BLOCK, TILE)
            key_offset = _tile_offset(key_tile, kv_head, KV_HEADS, D, TILE)
            k = tl.load(K + key_offset + kv_offsets)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)
            scores, slope = _cap_scores(scores, SOFTCAP * LOG2E)
            if needs_mask:
                keys = key_tile * TILE + tl.arange(0, TILE)
                scores = _mask_scores(scores, END, POSITION, queries[:, None], keys[None, :], WINDOW)
            d_weight = tl.dot(grad, tl.trans(tl.load(V + key_offset + kv_offsets)), input_precision=PRECISION)
            d_scores = tl.exp2(scores - lse[:, None]) * (d_weight - delta[:, None])
            if SOFTCAP > 0:
                d_scores *= slope
            d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision=PRECISION)
    tl.store(D_Q + own_offsets, (d_q * SCALE).to(D_Q.dtype.element_ty))


@triton.jit
def _backward_keys(
    Q, K, V, END, POSITION, BLOCK_LISTS, GRAD, LSE, DELTA, D_K, D_V, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    blocks, tile, num_full, num_tiles = _load_header(BLOCK_LISTS, tokens, BLOCK, TILE)
    keys = tile * TILE + tl.arange(0, TILE)
    own_offsets = _tile_offset(tile, kv_head, KV_HEADS, D, TILE) + _element_offsets(KV_HEADS, D, TILE)
    k, v = tl.load(K + own_offsets), tl.load(V + own_offsets)
    q_tiles = _tile_descriptor(Q, tokens, HEADS, D, TILE)
    grad_tiles = _tile_descriptor(GRAD, tokens, HEADS, D, TILE)
    d_k = tl.zeros([TILE, D], tl.float32)
    d_v = tl.zeros([TILE, D], tl.float32)
    for needs_mask in tl.static_range(2):
        first, last = (num_full, num_tiles) if needs_mask else (0, num_full)
        index, next_tile = first, _load_tile_index(blocks, first, BLOCK, TILE)
        next_head = kv_head * (HEADS // KV_HEADS)
        for _ in range((last - first) * (HEADS // KV_HEADS)):  # the list, once for each head that shares the keys
            query_tile, head = next_tile, next_head
            at_list_end = index + 1 == last
            index = tl.where(at_list_end, first, index + 1)
            next_head += at_list_end.to(tl.int32)
            next_tile = _load_tile_index(blocks, index, BLOCK, TILE)
            queries = query_tile * TILE + tl.arange(0, TILE)
            q = q_tiles.load([query_tile * TILE, head * D])
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * LOG2E)
            scores, slope = _cap_scores(scores, SOFTCAP * LOG2E)
            if needs_mask:
                scores = _mask_scores(scores, END, POSITION, queries[None, :], keys[:, None], WINDOW)
            weight = tl.exp2(scores - tl.load(LSE + head * tokens + queries)[None, :])
            grad = grad_tiles.load([query_tile * TILE, head * D])
            d_v = tl.dot(weight.to(grad.dtype), grad, d_v, input_precision=PRECISION)
            d_weight = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            d_scores = weight * (d_weight - tl.load(DELTA + head * tokens + queries)[None, :])
            if SOFTCAP > 0:
                d_scores *= slope
            d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    tl.store(D_K + own_offsets, (d_k * SCALE).to(D_K.dtype.element_ty))
    tl.store(D_V + own_offsets, d_v.to(D_V.dtype.element_ty))


# -- operators -------------------------------------------------------------------------------------------------------


@triton_op("ramify::tree_attention", mutates_args={})
def tree_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    end: Tensor,
    position: Tensor,
    kv_lists: Tensor,
    q_lists: Tensor,
    scale: float,
    window: int,
    block_size: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the attention output, [tokens, heads, width], and the base-2 log-sum-exp of scores, [heads, tokens]."""
    tokens, heads = query.shape[:2]
    out, lse = torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)
    constexprs = _constexpr_args(query, key, scale, window, block_size, softcap, stages=1)
    set_triton_allocator()
    inputs = query, key, value, query if sinks is None else sinks, end, position  # without sinks, none are read
    wrap_triton(_forward)[(heads, tokens // constexprs["TILE"])](
        *inputs, kv_lists, out, lse, tokens, HAS_SINKS=sinks is not None, **constexprs
    )
    return out, lse


@triton_op("ramify::tree_attention_backward", mutates_args={})
def _tree_attention_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    end: Tensor,
    position: Tensor,
    kv_lists: Tensor,
    q_lists: Tensor,
    scale: float,
    window: int,
    block_size: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    d_query, d_key, d_value, delta = (torch.empty_like(tensor) for tensor in (query, key, value, lse))
    stages = 2 if query.element_size() == 2 else 1
    constexprs = _constexpr_args(query, key, scale, window, block_size, softcap, stages)
    set_triton_allocator()
    inputs, saved = (query, key, value, end, position), (grad, lse, delta)
    wrap_triton(_backward_queries)[(heads, tokens // constexprs["TILE"])](
        *inputs, kv_lists, out, *saved, d_query, tokens, **constexprs
    )
    wrap_triton(_backward_keys)[(key.shape[1], tokens // constexprs["TILE"])](
        *inputs, q_lists, *saved, d_key, d_value, tokens, **constexprs
    )
    if sinks is None:
        return d_query, d_key, d_value, query.new_empty(0)
    weights = (sinks.float()[:, None] * LOG2E.value - lse).exp2()
    return d_query, d_key, d_value, -(weights * delta).sum(1).to(sinks.dtype)


def _constexpr_args(
    query: Tensor, key: Tensor, scale: float, window: int, block_size: int, softcap: float, stages: int
) -> dict[str, Any]:
    """Return the arguments that the kernels are compiled for."""
    return {
        "HEADS": query.shape[1],
        "KV_HEADS": key.shape[1],
        "D": query.shape[2],
        "BLOCK": block_size,
        "TILE": choose_tile(block_size, query.shape[2] * query.element_size(), get_shared_memory(query.device)),
        "WINDOW": window,
        "SCALE": scale,
        "SOFTCAP": softcap,
        "PRECISION": "ieee",  # of float32; the products of bfloat16 are exact
        "num_warps": 4 if query.element_size() == 2 else 8,
        "num_stages": stages,  # with one, more programs run at once
    }


def choose_tile(block: int, row_bytes: int, shared_memory: int) -> int:
    """Return the tokens that a program computes at once: a block, or a part of it of which shared memory holds five."""
    while 5 * block * row_bytes > shared_memory:
        block //= 2
    return block


def get_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have; without a GPU, the bytes of an H100."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def set_triton_allocator() -> None:
    """Set Triton's allocator for tensor descriptors. It is local to the thread and context, so every caller sets it."""
    triton.set_allocator(_allocate)


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.block_size, ctx.softcap = inputs
    ctx.save_for_backward(*tensors[:4], *output, *tensors[4:])


def _autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    arguments = grad.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window, ctx.block_size, ctx.softcap
    *grads, d_sinks = _tree_attention_backward_op(*arguments)
    return *grads, d_sinks if len(d_sinks) else None, *(None,) * 8


tree_attention_op.register_autograd(_autograd_backward, setup_context=_setup_context)
