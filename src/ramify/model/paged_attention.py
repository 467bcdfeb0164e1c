"""Attention over a paged key-value cache, as one function that any Hugging Face model can call.

A step runs a flat row of tokens that belong to many sequences. Keys and values are written to the pool first, each to
its own slot; then the queries are answered in *tiles*. A tile is a small rectangle of work: sequences of similar length
that bring a similar number of new tokens. Decoding is the tile with one token per sequence; a chunk of prefill is a
tile with more. For a tile the blocks of its sequences are gathered side by side, and what lies beyond a sequence or
after a token is masked. Grouped heads are folded into the query axis: they read the same keys, so nothing is repeated.

While the same sequences go on decoding, most of what would be gathered was gathered the step before. A tile that is
moved on *holds* its gathered keys and values, in the order in which attention reads them, and only the new token is
added. The pool stays complete, so a tile can be dropped at any time.
"""

import contextlib
import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.errors import ModelUnsupported

SPARE_KEYS = 128  # keys a held tile has room for beyond what it holds at first
PRETOUCH_BYTES = 1 << 30  # bytes of the cache that a CPU has from the start; the rest comes as it is used
KEY_MULTIPLE = 16  # attention reads held keys in multiples of this


class KVPool:
    """The key-value memory of all layers, in blocks of `block_size` tokens: keys and values of a token lie together."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.block_size, self.num_kv_heads, self.head_dim = block_size, num_kv_heads, head_dim
        self.token_width = 2 * num_kv_heads * head_dim
        shape = (num_blocks, block_size * self.token_width)
        self.layers = [
            _allocate_zeros(shape, dtype, torch.device(device), pretouch_bytes=PRETOUCH_BYTES // num_layers)
            for _ in range(num_layers)
        ]
        self.bytes_per_token = num_layers * self.token_width * dtype.itemsize
        self.slots = [layer.view(num_blocks * block_size, self.token_width) for layer in self.layers]
        self.layer_addresses = (ctypes.c_void_p * num_layers)(*(layer.data_ptr() for layer in self.layers))  # for C


def _allocate_zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, pretouch_bytes: int) -> Tensor:
    """Zeros, on Linux in large pages: attention jumps from block to block, and finding small ones takes a while.

    The kernel gives a page when it is touched, which is done now for the first `early` bytes, so that no step waits.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, shape[0] * shape[1] * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(memory, dtype=dtype)
    zeros[: pretouch_bytes // dtype.itemsize : mmap.PAGESIZE // dtype.itemsize] = 0
    return zeros.view(shape)


@dataclass(slots=True)
class AttentionTile:
    """`count` sequences with `queries` new tokens each; rows [start, stop) of the step, padded where they differ."""

    start: int
    stop: int
    num_sequences: int
    queries_per_sequence: int
    block_table: Tensor  # [count * blocks per sequence], the gathered blocks
    query_positions: Tensor  # [count, queries], of the queries; a key is seen up to its query's position
    pad_index: Tensor | None = None  # [count * queries] row of the tile for each query, where sequences are padded
    unpad_index: Tensor | None = None  # [stop - start] query of each row, the way back
    masks: dict[int, Tensor] = field(default_factory=dict)  # by sliding window, 0 is none
    max_keys: int = 0  # keys in sight of the longest sequence
    buffer_len: int = 0  # keys a held tile has room for; 0 does not hold
    kv_buffers: dict[int, Tensor] = field(default_factory=dict)  # layer: [2, count, kv_heads, room, head_dim]
    buffer_slots: Tensor | None = None  # where the new token goes in a held layer, once it is filled

    def advance(self, max_keys: int, pool: "KVPool", max_buffer_bytes: int) -> bool:
        """Go on to the next token of every sequence, at `positions`; False if it does not fit into what is held.

        From the first move on the tile holds, if its keys and values take at most `most` bytes.
        """
        self.max_keys, full, self.masks = max_keys, self.masks.get(0), {}
        if not self.kv_buffers:
            room = -(-(max_keys + SPARE_KEYS) // pool.block_size) * pool.block_size
            self.buffer_len = room if self.num_sequences * room * pool.bytes_per_token <= max_buffer_bytes else 0
            return True
        if max_keys > self.buffer_len:
            return False
        positions = self.query_positions.view(-1, 1, 1)
        if full is not None:
            self.masks[0] = full.scatter_(3, positions.unsqueeze(-1), 0.0)
        sequence = torch.arange(self.num_sequences, device=positions.device).view(-1, 1, 1)
        side = torch.arange(2, device=positions.device).view(1, -1, 1)
        head = torch.arange(pool.num_kv_heads, device=positions.device)
        place = ((side * self.num_sequences + sequence) * pool.num_kv_heads + head) * self.buffer_len
        self.buffer_slots = (place + positions).view(-1)
        return True

    def get_mask(self, window: int, num_keys: int, heads_per_kv_head: int, dtype: torch.dtype) -> Tensor:
        """[count, 1, groups * queries, keys], 0 where a query sees a key and -inf where not. Made once per step."""
        if window not in self.masks:
            key = torch.arange(num_keys, device=self.query_positions.device)
            position = self.query_positions.unsqueeze(-1)
            hidden = key > position
            if window:
                hidden = hidden | (key <= position - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))
            mask = mask.unsqueeze(1)
            self.masks[window] = mask.repeat(1, 1, heads_per_kv_head, 1) if self.queries_per_sequence > 1 else mask
        return self.masks[window]


@dataclass(slots=True)
class AttentionMetadata:
    """What attention needs to know about one step."""

    pool: KVPool
    slot_mapping: Tensor  # [rows] where each new token's keys and values go
    tiles: list[AttentionTile]
    last_layer: int = -1  # the last that has attended


def write_kv(attn_metadata: AttentionMetadata, layer_index: int, key_value: Tensor) -> None:
    """Store the new tokens' keys and values, [rows, 2 * kv_heads * head_dim]."""
    attn_metadata.pool.slots[layer_index].index_copy_(0, attn_metadata.slot_mapping, key_value)
    for tile in attn_metadata.tiles:
        if tile.buffer_slots is not None:
            new = key_value[tile.start : tile.stop].reshape(-1, attn_metadata.pool.head_dim)
            tile.kv_buffers[layer_index].view(-1, attn_metadata.pool.head_dim).index_copy_(0, tile.buffer_slots, new)


def attend_tiles(
    attn_metadata: AttentionMetadata, layer_index: int, query: Tensor, scaling: float | None, window: int = 0
) -> Tensor:
    """[rows, heads, head_dim] queries against the cache, after `write`."""
    if len(attn_metadata.tiles) == 1:
        return attend_tile(attn_metadata, attn_metadata.tiles[0], layer_index, query, scaling, window)
    parts = [
        attend_tile(attn_metadata, tile, layer_index, query[tile.start : tile.stop], scaling, window)
        for tile in attn_metadata.tiles
    ]
    return torch.cat(parts)


def attend_tile(
    attn_metadata: AttentionMetadata,
    tile: AttentionTile,
    layer_index: int,
    query: Tensor,
    scaling: float | None,
    window: int = 0,
) -> Tensor:
    """The same for the queries of one tile."""
    pool = attn_metadata.pool
    heads, count, queries = pool.num_kv_heads, tile.num_sequences, tile.queries_per_sequence
    groups = query.shape[1] // heads
    key, value, keys = (
        _get_buffered_kv(pool, tile, layer_index) if tile.buffer_len else _gather_kv(pool, tile, layer_index)
    )
    mask = tile.get_mask(window, keys, groups, query.dtype)[..., : key.shape[2]]
    if queries == 1:
        folded = query.reshape(count, heads, groups, pool.head_dim)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(count, heads * groups, pool.head_dim)
    if tile.pad_index is not None:
        query = query.index_select(0, tile.pad_index)
    folded = query.view(count, queries, heads, groups, pool.head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(count, heads, groups * queries, pool.head_dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    out = out.view(count, heads, groups, queries, pool.head_dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(count * queries, heads * groups, pool.head_dim)
    return out if tile.unpad_index is None else out.index_select(0, tile.unpad_index)


def _gather_kv(pool: KVPool, tile: AttentionTile, layer_index: int) -> tuple[Tensor, Tensor, int]:
    """Keys and values of the tile's sequences, views of [count, kv_heads, keys, head_dim], and how many keys."""
    rows = pool.layers[layer_index].index_select(0, tile.block_table)
    key, value = rows.view(tile.num_sequences, -1, 2, pool.num_kv_heads, pool.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return key, value, key.shape[2]


def _get_buffered_kv(pool: KVPool, tile: AttentionTile, layer_index: int) -> tuple[Tensor, Tensor, int]:
    """The same from what the tile holds; filled from the pool the first time."""
    held = tile.kv_buffers.get(layer_index)
    if held is None:
        key, value, keys = _gather_kv(pool, tile, layer_index)
        held = key.new_zeros(2, tile.num_sequences, pool.num_kv_heads, tile.buffer_len, pool.head_dim)
        held[0, :, :, :keys], held[1, :, :, :keys] = key, value
        tile.kv_buffers[layer_index] = held
    seen = -(-tile.max_keys // KEY_MULTIPLE) * KEY_MULTIPLE
    key, value = held[:, :, :, :seen].unbind(0)
    return key, value, tile.buffer_len


def paged_attention(
    module: Any,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    step: AttentionMetadata | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer; `step` is what the engine passed to `forward`."""
    if step is None:
        raise ModelUnsupported(f"{type(module).__name__} did not pass the step on to its attention function")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ModelUnsupported(f"{type(module).__name__} uses {name}, which the paged attention does not know")
    reject_custom_masks(module, attention_mask)
    pool, heads = step.pool, [(each.shape[1], each.shape[3]) for each in (key, value)]
    if heads != [(pool.num_kv_heads, pool.head_dim)] * 2:
        said = f"expected keys and values of (heads, width) {(pool.num_kv_heads, pool.head_dim)}, got {heads}"
        raise ModelUnsupported(f"{type(module).__name__} has heads that its config does not tell: {said}")
    if module.layer_idx <= step.last_layer:  # it would write over its keys
        raise ModelUnsupported(f"{type(module).__name__} attends twice in a layer, which the paged cache cannot hold")
    step.last_layer = module.layer_idx
    rows = query.shape[2]
    both = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)  # [rows, 2, kv_heads, head_dim]
    write_kv(step, module.layer_idx, both.reshape(rows, -1))
    out = attend_tiles(step, module.layer_idx, query[0].transpose(0, 1), scaling, kwargs.get("sliding_window") or 0)
    return out.unsqueeze(0).contiguous(), None


def reject_custom_masks(module: Any, mask: Tensor | None) -> None:
    """Who sees whom is told to our attention beside the mask, which transformers leaves out for it."""
    if mask is not None:
        raise ModelUnsupported(f"{type(module).__name__} makes a mask of its own, which our attention does not read")
    if getattr(module, "is_causal", None) is False:
        raise ModelUnsupported(f"{type(module).__name__} looks ahead, which our attention does not do")
