"""Attention over the paged cache on CUDA, by the work items of a `ramify.model.kernels.attention_plan.AttentionPlan`.

Up to `max_graph_rows` rows a fixed number of programs takes the items in turns, whatever their number, so a captured
graph serves every plan with its number of rows. Larger steps, which are not captured, launch only what their plan
needs; their chunks of prompts have a kernel of their own, with more queries at once.

An item is computed for all query heads that read the same key head at once, as one matrix of queries. Keys and values
are read from the cache through the block table, never copied. As in tree attention, the running maximum of a row is an
integer, so that changing it only shifts exponents: a row gets the same rounded weights however its keys are cut into
pieces. An attention sink is added once to a row: by its only piece, or when its pieces are merged.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.attention_plan import HEADER_INTS, ITEM_INTS, AttentionPlan, KernelShape, build_plan
from ramify.model.kernels.chunk_plan import plan_chunks
from ramify.model.kernels.cuda.scores import LOG2E, MASKED_SCORE, start_sums, tanh
from ramify.model.kernels.paged_attention import AttentionMetadata, DevicePlan, KVPool, StepSequences
from ramify.model.kernels.state_pool import StatePool

HEADER = tl.constexpr(HEADER_INTS)
ITEM = tl.constexpr(ITEM_INTS)
PROGRAMS_PER_PROCESSOR = 3  # as many as have room for their keys and values at the same time
SMALL_QUERIES = 16  # of a matrix product, at least
LARGE_QUERIES = 32


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _attend_item(
    item, kv_head, Q, CACHE, SINKS, PLAN, POSITIONS, OUT, PARTIALS, PARTIAL_SUMS, q_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one item for the query heads of one key head."""
    group: tl.constexpr = HEADS // KV_HEADS
    score_unit: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    row_start, num_rows = tl.load(item), tl.load(item + 1)
    table, key_start, key_stop, partial = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    query = tl.arange(0, QUERIES)
    local_row, head = query // group, kv_head * group + query % group
    is_query = local_row < num_rows
    row = row_start + local_row
    position = tl.load(POSITIONS + row, mask=is_query, other=-1)
    column = tl.arange(0, D_BLOCK)
    is_value = is_query[:, None] & (column < D)[None, :]
    offsets = row.to(tl.int64)[:, None] * q_stride + (head * D)[:, None] + column[None, :]
    q = tl.load(Q + offsets, mask=is_value, other=0.0)
    stop = tl.minimum(key_stop, tl.max(position, 0) + 1)
    start = key_start
    if WINDOW:
        first_seen = tl.min(tl.where(is_query, position, 2147483647), 0) - (WINDOW - 1)
        start = tl.maximum(start, tl.maximum(first_seen, 0) // KEYS * KEYS)
    acc = tl.zeros([QUERIES, D_BLOCK], tl.float32)
    row_max, row_sum = _start_item(SINKS, head, partial, HAS_SINKS)
    for tile in tl.range(start, stop, KEYS, num_stages=STAGES):
        key = tile + tl.arange(0, KEYS)
        block = tl.load(PLAN + table + key // BLOCK_SIZE, mask=key < stop, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        is_key = (key < stop)[:, None] & (column < D)[None, :]
        kv_offsets = slot[:, None] * (2 * KV_HEADS * D) + kv_head * D + column[None, :]
        k = tl.load(CACHE + kv_offsets, mask=is_key, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = tanh(scores * (SCALE / SOFTCAP))
        visible = (key < stop)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible &= position[:, None] - key[None, :] < WINDOW
        scores = tl.where(visible, scores * score_unit, MASKED_SCORE)
        new_max = tl.maximum(row_max, tl.ceil(tl.max(scores, 1)))
        rescale = tl.exp2(row_max - new_max)
        weight = tl.where(visible, tl.exp2(scores - new_max[:, None]), 0.0)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weight, 1)
        v = tl.load(CACHE + kv_offsets + KV_HEADS * D, mask=is_key, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    _store_item(
        acc, row_max, row_sum, row, local_row, head, is_query, partial, OUT, PARTIALS, PARTIAL_SUMS, HEADS, D, D_BLOCK
    )


@triton.jit
def _start_item(SINKS, heads, partial, HAS_SINKS: tl.constexpr):
    """Return the running maximum and the sum of rows before the first key; partial results have no sink."""
    row_max, row_sum = start_sums(SINKS, heads, HAS_SINKS)
    if HAS_SINKS:
        row_max = tl.where(partial < 0, row_max, MASKED_SCORE)
        row_sum = tl.where(partial < 0, row_sum, 0.0)
    return row_max, row_sum


@triton.jit
def _store_item(
    acc, row_max, row_sum, row, local_row, head, is_query, partial, OUT, PARTIALS, PARTIAL_SUMS,
    HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the result of an item, or its partial results."""
    column = tl.arange(0, D_BLOCK)
    is_value = is_query[:, None] & (column < D)[None, :]
    if partial < 0:
        out_offsets = row.to(tl.int64)[:, None] * (HEADS * D) + (head * D)[:, None] + column[None, :]
        tl.store(OUT + out_offsets, (acc / row_sum[:, None]).to(OUT.dtype.element_ty), mask=is_value)
    else:
        index = (partial + local_row).to(tl.int64) * HEADS + head
        tl.store(PARTIALS + index[:, None] * D + column[None, :], acc, mask=is_value)
        tl.store(PARTIAL_SUMS + index * 2, row_max, mask=is_query)
        tl.store(PARTIAL_SUMS + index * 2 + 1, row_sum, mask=is_query)


@triton.jit
def _attend(
    Q, CACHE, SINKS, PLAN, POSITIONS, OUT, PARTIALS, PARTIAL_SUMS, q_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SMALL: tl.constexpr, LARGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_large, num_small = tl.load(PLAN), tl.load(PLAN + 1)
    for work in range(tl.program_id(0), num_large * KV_HEADS, tl.num_programs(0)):
        _attend_item(
            PLAN + HEADER + work // KV_HEADS * ITEM, work % KV_HEADS,
            Q, CACHE, SINKS, PLAN, POSITIONS, OUT, PARTIALS, PARTIAL_SUMS, q_stride,
            HEADS, KV_HEADS, D, D_BLOCK, BLOCK_SIZE, LARGE, KEYS, WINDOW, SCALE, SOFTCAP, HAS_SINKS, PRECISION,
            STAGES,
        )  # fmt: skip
    small_items = PLAN + HEADER + num_large * ITEM
    # The last programs have had the fewest large items, so they begin.
    for work in range(tl.num_programs(0) - 1 - tl.program_id(0), num_small * KV_HEADS, tl.num_programs(0)):
        _attend_item(
            small_items + work // KV_HEADS * ITEM, work % KV_HEADS,
            Q, CACHE, SINKS, PLAN, POSITIONS, OUT, PARTIALS, PARTIAL_SUMS, q_stride,
            HEADS, KV_HEADS, D, D_BLOCK, BLOCK_SIZE, SMALL, KEYS, WINDOW, SCALE, SOFTCAP, HAS_SINKS, PRECISION,
            STAGES,
        )  # fmt: skip


@triton.jit
def _attend_chunks(
    Q, CACHE, SINKS, PLAN, POSITIONS, OUT, PARTIALS, PARTIAL_SUMS, q_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one chunk item for the query heads of one key head.

    Tiles of keys that all rows see come first and need no mask. Block numbers are read one tile ahead.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    score_unit: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    kv_head = tl.program_id(0) % KV_HEADS
    item = PLAN + HEADER + (tl.load(PLAN) + tl.load(PLAN + 1) + tl.program_id(0) // KV_HEADS) * ITEM
    row_start, num_rows = tl.load(item), tl.load(item + 1)
    table, start, key_stop, partial = PLAN + tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    query = tl.arange(0, QUERIES)
    local_row, head = query // group, kv_head * group + query % group
    is_query = local_row < num_rows
    row = row_start + local_row
    first_position = tl.load(POSITIONS + row_start)
    position = first_position + local_row  # the rows of a chunk are adjacent tokens
    column = tl.arange(0, D_BLOCK)
    offsets = row.to(tl.int64)[:, None] * q_stride + (head * D)[:, None] + column[None, :]
    q = tl.load(Q + offsets, mask=is_query[:, None] & (column < D)[None, :], other=0.0)
    stop = tl.minimum(key_stop, first_position + num_rows)
    num_before = 0  # tiles of which the last rows see only a part, because of the window
    if WINDOW:
        start += tl.maximum(first_position - (WINDOW - 1) - start, 0) // KEYS * KEYS
        num_before = tl.cdiv(tl.maximum(first_position + num_rows - WINDOW - start, 0), KEYS)
    num_full = tl.maximum(tl.minimum(stop, first_position + 1) - start - num_before * KEYS, 0) // KEYS
    acc = tl.zeros([QUERIES, D_BLOCK], tl.float32)
    row_max, row_sum = _start_item(SINKS, head, partial, HAS_SINKS)
    cache_columns = CACHE + kv_head * D + column[None, :]
    for needs_mask in tl.static_range(2):
        # The tiles of the other loop are skipped.
        first_skipped, num_skipped = (num_before, num_full) if needs_mask else (0, num_before)
        num_tiles = tl.cdiv(stop - start, KEYS) - num_full if needs_mask else num_full
        next_key = start + (0 if first_skipped > 0 else num_skipped) * KEYS + tl.arange(0, KEYS)
        next_block = tl.load(table + next_key // BLOCK_SIZE, mask=next_key < stop, other=0)
        for index in tl.range(num_tiles, num_stages=STAGES):
            key, block = next_key, next_block
            next_tile = index + 1
            next_tile += tl.where(next_tile >= first_skipped, num_skipped, 0)
            next_key = start + next_tile * KEYS + tl.arange(0, KEYS)
            next_block = tl.load(table + next_key // BLOCK_SIZE, mask=next_key < stop, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            pointers = cache_columns + slot[:, None] * (2 * KV_HEADS * D)
            k = _load_tile(pointers, key < stop, column < D, needs_mask or D < D_BLOCK)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SOFTCAP > 0:
                scores = tanh(scores * (SCALE / SOFTCAP))
            if needs_mask:
                visible = key[None, :] <= position[:, None]
                if WINDOW:
                    visible &= position[:, None] - key[None, :] < WINDOW
                scores = tl.where(visible & (key < stop)[None, :], scores, MASKED_SCORE)
            new_max = tl.maximum(row_max, tl.ceil(tl.max(scores, 1) * score_unit))
            rescale = tl.exp2(row_max - new_max)
            weight = tl.exp2(scores * score_unit - new_max[:, None])
            row_max, row_sum = new_max, row_sum * rescale + tl.sum(weight, 1)
            v = _load_tile(pointers + KV_HEADS * D, key < stop, column < D, needs_mask or D < D_BLOCK)
            acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    _store_item(
        acc, row_max, row_sum, row, local_row, head, is_query, partial, OUT, PARTIALS, PARTIAL_SUMS, HEADS, D, D_BLOCK
    )


@triton.jit
def _load_tile(pointers, is_key, is_column, MASKED: tl.constexpr):
    """Load keys or values; without a mask the loads are as wide as possible."""
    mask = is_key[:, None] & is_column[None, :] if MASKED else None
    return tl.load(pointers, mask=mask, other=0.0 if MASKED else None)


@triton.jit
def _merge(
    SINKS, PLAN, OUT, PARTIALS, PARTIAL_SUMS,
    HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a row's heads, by their maxima and sums, and add the sinks."""
    row, head, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, D_BLOCK)
    bounds = PLAN + tl.load(PLAN + 2) + 2 * row
    first, last = tl.load(bounds), tl.load(bounds + 1)
    if first < last:
        partials = PLAN + tl.load(PLAN + 3)
        is_head = head < HEADS
        is_value = is_head[:, None] & (column < D)[None, :]
        acc = tl.zeros([TILE, D_BLOCK], tl.float32)
        row_max, row_sum = start_sums(SINKS, tl.where(is_head, head, 0), HAS_SINKS)
        for position in range(first, last):
            index = tl.load(partials + position).to(tl.int64) * HEADS + head
            part_max = tl.load(PARTIAL_SUMS + index * 2, mask=is_head, other=MASKED_SCORE)
            part_sum = tl.load(PARTIAL_SUMS + index * 2 + 1, mask=is_head, other=0.0)
            part = tl.load(PARTIALS + index[:, None] * D + column[None, :], mask=is_value, other=0.0)
            new_max = tl.maximum(row_max, part_max)
            old_scale, part_scale = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
            acc = acc * old_scale[:, None] + part * part_scale[:, None]
            row_max, row_sum = new_max, row_sum * old_scale + part_sum * part_scale
        out_offsets = row.to(tl.int64) * (HEADS * D) + (head * D)[:, None] + column[None, :]
        tl.store(OUT + out_offsets, (acc / row_sum[:, None]).to(OUT.dtype.element_ty), mask=is_value)


# -- operators -------------------------------------------------------------------------------------------------------


class PagedAttention:
    """The kernels for one model, and the memory of their partial results."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_graph_rows: int = 1024,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._block_size, self._group, self._max_graph_rows = block_size, heads // kv_heads, max_graph_rows
        small = max(SMALL_QUERIES, triton.next_power_of_2(self._group))
        self._num_programs = count_processors(device) * PROGRAMS_PER_PROCESSOR
        is_half, width = dtype.itemsize == 2, max(16, triton.next_power_of_2(head_dim))
        self._constants: dict[str, Any] = {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "D": head_dim,
            "D_BLOCK": width,
            "BLOCK_SIZE": block_size,
            "PRECISION": None if is_half else "ieee",
        }
        self._attend_constants: dict[str, Any] = {
            "SMALL": small,
            "LARGE": max(small, LARGE_QUERIES),
            "KEYS": 64 if is_half else 32 if width <= 128 else 16,  # 99 KiB of shared memory, the least there is
            "STAGES": 2,
            "num_warps": 4,
        }
        self._chunk_constants = choose_chunk_constants(width, small, is_half=is_half)
        self._plan: AttentionPlan | None = None
        self._partials = torch.empty(0, heads, head_dim, dtype=torch.float32, device=device)
        self._partial_sums = torch.empty(0, heads, 2, dtype=torch.float32, device=device)

    def get_shape(self, num_rows: int, *, share: bool = True) -> KernelShape:
        """Return what the plan of a step with `num_rows` rows has to know."""
        return KernelShape(
            num_programs=self._num_programs,
            kv_heads=self.kv_heads,
            rows_per_item=self._attend_constants["LARGE"] // self._group,
            block_size=self._block_size,
            share=share,
            rows_per_chunk_item=self._chunk_constants["QUERIES"] // self._group
            if num_rows > self._max_graph_rows
            else 0,
        )

    def prepare(self, plan: AttentionPlan) -> bool:
        """Use the plan in the next calls; return whether memory has moved, so that graphs are invalid."""
        self._plan = plan
        return self.reserve_partials(plan.num_partials)

    def reserve_partials(self, count: int) -> bool:
        """Make room for partial results; return whether the memory has moved, so that graphs are invalid."""
        if count <= len(self._partials):
            return False
        count = triton.next_power_of_2(count)
        self._partials = self._partials.new_empty(count, *self._partials.shape[1:])
        self._partial_sums = self._partial_sums.new_empty(count, *self._partial_sums.shape[1:])
        return True

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        plan: Tensor,
        positions: Tensor,
        *,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of `query` [rows, heads, head_dim] to the slots of a layer, [rows, heads, head_dim]."""
        if query.stride()[1:] != (self.head_dim, 1):
            query = query.contiguous()
        rows = len(query)
        out = torch.empty(rows, self.heads, self.head_dim, dtype=query.dtype, device=query.device)
        step = self._plan if rows > self._max_graph_rows else None
        num_other_items = 1 if step is None else step.num_other_items
        num_chunk_items = 0 if step is None else step.num_chunk_items
        num_merged_rows = rows if step is None else step.num_merged_rows
        sink_memory = query if sinks is None else sinks  # without sinks, none are read
        outputs, has_sinks = (out, self._partials, self._partial_sums), sinks is not None
        arguments = query, cache, sink_memory, plan, positions, *outputs, query.stride(0)
        constants = {**self._constants, "WINDOW": window, "SCALE": scaling, "SOFTCAP": softcap, "HAS_SINKS": has_sinks}
        if num_other_items:
            _attend[(self._num_programs,)](*arguments, **constants, **self._attend_constants)
        if num_chunk_items:
            _attend_chunks[(num_chunk_items * self.kv_heads,)](*arguments, **constants, **self._chunk_constants)
        if num_merged_rows:
            tile = min(4, triton.next_power_of_2(self.heads))
            _merge[(num_merged_rows, triton.cdiv(self.heads, tile))](
                sink_memory, plan, *outputs, HEADS=self.heads, D=self.head_dim, D_BLOCK=self._constants["D_BLOCK"],
                TILE=tile, HAS_SINKS=has_sinks, num_warps=4,
            )  # fmt: skip
        return out


def choose_chunk_constants(width: int, min_queries: int, *, is_half: bool) -> dict[str, Any]:
    """Return the tile sizes of chunk items for heads of `width`: with `maxnreg` registers two programs run at once."""
    if is_half and width <= 128:
        return {"QUERIES": max(min_queries, 128), "KEYS": 32, "STAGES": 3, "num_warps": 8, "maxnreg": 128}
    queries, keys = (64, 32) if is_half or width <= 128 else (32, 16)
    return {"QUERIES": max(min_queries, queries), "KEYS": keys, "STAGES": 2, "num_warps": 4}


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where Triton interprets the kernels on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def plan_one_sequence(
    pool: KVPool, heads: int, start: int, stop: int, states: StatePool | None = None
) -> AttentionMetadata:
    """Return the metadata of a step with tokens [start, stop) of one sequence, in the first blocks and state slot."""
    slots = pool.slots[0]
    kernels = PagedAttention(
        heads=heads,
        kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        block_size=pool.block_size,
        dtype=slots.dtype,
        device=slots.device,
    )
    plan = build_plan([np.arange(len(pool.layers[0]))], [start], [stop], stop - start, kernels.get_shape(stop - start))
    kernels.prepare(plan)
    positions = torch.arange(start, stop, device=slots.device)
    bounds = torch.tensor([0, stop - start], dtype=torch.int32, device=slots.device)
    rows = torch.zeros(stop - start, dtype=torch.int32, device=slots.device)
    chunks, tracks = torch.from_numpy(plan_chunks([0], [stop - start], [0])).to(slots.device)
    sequences = StepSequences(rows, bounds[:1], bounds[1:], rows[:1], chunks, tracks)
    device_plan = DevicePlan(torch.from_numpy(plan.data).to(slots.device), positions, kernels, sequences)
    return AttentionMetadata(pool, positions, plan=device_plan, states=states)
