"""Tree attention on CUDA: Triton kernels that visit only blocks in which something is seen.

A list for each block of queries names the blocks of keys it sees, and one for each block of keys the queries that see
it (`ramify.model.tree_attention.Blocks`); what is seen wholly comes first and needs no mask. Forward, a program owns a
block of queries and runs over keys. Backward, queries and keys are owned in turn: no two programs add to the same
place, so gradients are the same bits each time. Very long lists come first: a program that starts late should have
little to do. Tensors are [tokens, heads, width] without gaps; scores are in base 2. Lists are read one step ahead: what
is asked for next must be known when it is asked for. Where it pays, what a loop reads comes through the copy engine of
the chip, which takes the corner of a block instead of an address for each thread (`_corners`); where there is none,
Triton does without.

The running maximum of a row is a whole number, so that changing it shifts exponents and nothing else: weights are
rounded to bfloat16 the same way whatever was seen before them, and a path is computed alike wherever it lies in a pack.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - comes with a torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2E = tl.constexpr(1.4426950408889634)
# The score of what is not seen: finite, so that a row of nothing else is not NaN yet, and a power of two, so that it
# stays exact when it is scaled and the largest score of such a row minus itself is 0
MASKED_SCORE = tl.constexpr(-(2.0**100))


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _block_offset(block, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Where the block of a head begins."""
    return block.to(tl.int64) * (BLOCK * HEADS * D) + head * D


@triton.jit
def _element_offsets(HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Where the numbers of a block lie, from its beginning."""
    return tl.arange(0, BLOCK)[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]


@triton.jit
def _block_descriptor(X, tokens, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """A tensor of which blocks of a head are read by the place of their first number."""
    return tl.make_tensor_descriptor(X, [tokens, HEADS * D], [HEADS * D, 1], [BLOCK, D])


@triton.jit
def _mask_scores(scores, END, POSITION, queries, keys, WINDOW: tl.constexpr):
    """Scores of the pairs that are seen; queries and keys are a column and a row, or a row and a column."""
    seen = (keys <= queries) & (queries < tl.load(END + keys))
    if WINDOW:
        seen &= tl.load(POSITION + queries) - tl.load(POSITION + keys) < WINDOW
    return tl.where(seen, scores, MASKED_SCORE)


@triton.jit
def _forward(
    Q, K, V, END, POSITION, BLOCK_LISTS, OUT, LSE, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, line = tl.program_id(0), BLOCK_LISTS + tl.program_id(1) * (tokens // BLOCK + 3)
    block, wholly, in_all = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    shared = head // (HEADS // KV_HEADS)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    own = _block_offset(block, head, HEADS, D, BLOCK) + _element_offsets(HEADS, D, BLOCK)
    q = tl.load(Q + own)
    k_blocks, v_blocks = (
        _block_descriptor(K, tokens, KV_HEADS, D, BLOCK),
        _block_descriptor(V, tokens, KV_HEADS, D, BLOCK),
    )
    found = tl.zeros([BLOCK, D], tl.float32)
    most = tl.full([BLOCK], MASKED_SCORE, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for partly in tl.static_range(2):
        first, last = (wholly, in_all) if partly else (0, wholly)
        following = tl.load(line + 3 + first)
        for number in range(first, last):
            other, following = following, tl.load(line + 3 + tl.minimum(number + 1, in_all - 1))
            scores = tl.dot(q, tl.trans(k_blocks.load([other * BLOCK, shared * D])), input_precision=PRECISION)
            if partly:
                keys = other * BLOCK + tl.arange(0, BLOCK)
                scores = _mask_scores(scores, END, POSITION, queries[:, None], keys[None, :], WINDOW)
            larger = tl.maximum(most, tl.ceil(tl.max(scores, 1) * (SCALE * LOG2E)))
            less = tl.exp2(most - larger)
            weight = tl.exp2(scores * (SCALE * LOG2E) - larger[:, None])
            most, total = larger, total * less + tl.sum(weight, 1)
            v = v_blocks.load([other * BLOCK, shared * D])
            found = tl.dot(weight.to(v.dtype), v, found * less[:, None], input_precision=PRECISION)
    tl.store(OUT + own, (found / total[:, None]).to(OUT.dtype.element_ty))
    tl.store(LSE + head * tokens + queries, most + tl.log2(total))


@triton.jit
def _backward_queries(
    Q, K, V, END, POSITION, BLOCK_LISTS, OUT, GRAD, LSE, DELTA, D_Q, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, line = tl.program_id(0), BLOCK_LISTS + tl.program_id(1) * (tokens // BLOCK + 3)
    block, wholly, in_all = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    shared = head // (HEADS // KV_HEADS)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    own = _block_offset(block, head, HEADS, D, BLOCK) + _element_offsets(HEADS, D, BLOCK)
    rows = _element_offsets(KV_HEADS, D, BLOCK)
    q, grad = tl.load(Q + own), tl.load(GRAD + own)
    lse, delta = tl.load(LSE + head * tokens + queries), tl.sum(tl.load(OUT + own).to(tl.float32) * grad, 1)
    tl.store(DELTA + head * tokens + queries, delta)
    d_q = tl.zeros([BLOCK, D], tl.float32)
    for partly in tl.static_range(2):
        first, last = (wholly, in_all) if partly else (0, wholly)
        following = tl.load(line + 3 + first)
        for number in range(first, last):
            other, following = following, tl.load(line + 3 + tl.minimum(number + 1, in_all - 1))
            at = _block_offset(other, shared, KV_HEADS, D, BLOCK)
            k = tl.load(K + at + rows)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)
            if partly:
                keys = other * BLOCK + tl.arange(0, BLOCK)
                scores = _mask_scores(scores, END, POSITION, queries[:, None], keys[None, :], WINDOW)
            asked = tl.dot(grad, tl.trans(tl.load(V + at + rows)), input_precision=PRECISION)
            d_scores = tl.exp2(scores - lse[:, None]) * (asked - delta[:, None])
            d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision=PRECISION)
    tl.store(D_Q + own, (d_q * SCALE).to(D_Q.dtype.element_ty))


@triton.jit
def _backward_keys(
    Q, K, V, END, POSITION, BLOCK_LISTS, GRAD, LSE, DELTA, D_K, D_V, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    shared, line = tl.program_id(0), BLOCK_LISTS + tl.program_id(1) * (tokens // BLOCK + 3)
    block, wholly, in_all = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    keys = block * BLOCK + tl.arange(0, BLOCK)
    own = _block_offset(block, shared, KV_HEADS, D, BLOCK) + _element_offsets(KV_HEADS, D, BLOCK)
    k, v = tl.load(K + own), tl.load(V + own)
    q_blocks, grad_blocks = (
        _block_descriptor(Q, tokens, HEADS, D, BLOCK),
        _block_descriptor(GRAD, tokens, HEADS, D, BLOCK),
    )
    d_k = tl.zeros([BLOCK, D], tl.float32)
    d_v = tl.zeros([BLOCK, D], tl.float32)
    for partly in tl.static_range(2):
        first, last = (wholly, in_all) if partly else (0, wholly)
        place, following = first, tl.load(line + 3 + first)
        coming = shared * (HEADS // KV_HEADS)
        for _ in range((last - first) * (HEADS // KV_HEADS)):  # the list, once for each head that shares the keys
            other, head = following, coming
            again = place + 1 == last
            place = tl.where(again, first, place + 1)
            coming += again.to(tl.int32)
            following = tl.load(line + 3 + place)
            queries = other * BLOCK + tl.arange(0, BLOCK)
            q = q_blocks.load([other * BLOCK, head * D])
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * LOG2E)
            if partly:
                scores = _mask_scores(scores, END, POSITION, queries[None, :], keys[:, None], WINDOW)
            weight = tl.exp2(scores - tl.load(LSE + head * tokens + queries)[None, :])
            grad = grad_blocks.load([other * BLOCK, head * D])
            d_v = tl.dot(weight.to(grad.dtype), grad, d_v, input_precision=PRECISION)
            asked = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            d_scores = weight * (asked - tl.load(DELTA + head * tokens + queries)[None, :])
            d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    tl.store(D_K + own, (d_k * SCALE).to(D_K.dtype.element_ty))
    tl.store(D_V + own, d_v.to(D_V.dtype.element_ty))


# -- operators -------------------------------------------------------------------------------------------------------


@triton_op("ramify::tree_attention", mutates_args={})
def tree_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    end: Tensor,
    position: Tensor,
    kv_lists: Tensor,
    q_lists: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """What the queries find, and their log-sum-exp, [heads, tokens]."""
    tokens, heads = query.shape[:2]
    out, lse = torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)
    fixed = _constexpr_args(query, key, kv_lists, scale, window, stages=1)
    set_triton_allocator()
    wrap_triton(_forward)[(heads, len(kv_lists))](query, key, value, end, position, kv_lists, out, lse, tokens, **fixed)
    return out, lse


@triton_op("ramify::tree_attention_backward", mutates_args={})
def _tree_attention_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    end: Tensor,
    position: Tensor,
    kv_lists: Tensor,
    q_lists: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    d_query, d_key, d_value, delta = (torch.empty_like(each) for each in (query, key, value, lse))
    fixed = _constexpr_args(query, key, kv_lists, scale, window, stages=2 if query.element_size() == 2 else 1)
    set_triton_allocator()
    seen, found = (query, key, value, end, position), (grad, lse, delta)
    wrap_triton(_backward_queries)[(heads, len(kv_lists))](*seen, kv_lists, out, *found, d_query, tokens, **fixed)
    wrap_triton(_backward_keys)[(key.shape[1], len(q_lists))](*seen, q_lists, *found, d_key, d_value, tokens, **fixed)
    return d_query, d_key, d_value


def _constexpr_args(
    query: Tensor, key: Tensor, kv_lists: Tensor, scale: float, window: int, stages: int
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "HEADS": query.shape[1],
        "KV_HEADS": key.shape[1],
        "D": query.shape[2],
        "BLOCK": query.shape[0] // len(kv_lists),
        "WINDOW": window,
        "SCALE": scale,
        "PRECISION": "ieee",  # of float32; the products of bfloat16 are exact
        "num_warps": 4 if query.element_size() == 2 else 8,
        "num_stages": stages,  # with one, more programs run at once
    }


def set_triton_allocator() -> None:
    """Let the kernels have memory for their descriptors; each thread, and each context of one, must say so itself."""
    triton.set_allocator(_allocate)


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    given = grad.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window
    grads = _tree_attention_backward_op(*given)  # pyright: ignore[reportCallIssue]
    return *grads, None, None, None, None, None, None


tree_attention_op.register_autograd(_backward, setup_context=_setup_context)
