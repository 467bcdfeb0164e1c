"""Attention over a paged key-value cache, as one function that any Hugging Face model can call.

A step runs a flat row of tokens that belong to many sequences. Keys and values are written to the pool first, each to
its own slot; then attention is computed in *tiles*. A tile is a rectangle of sequences of similar length that bring a
similar number of new tokens: a decode step is a tile with one token per sequence, a chunk of prefill is a tile with
more. For a tile the blocks of its sequences are gathered side by side, and keys beyond a sequence or after a token are
masked. Query heads that share a key head are folded into the query axis, so keys are not repeated.

While the same sequences keep decoding, a step would gather almost the same keys and values as the step before. A tile
that is advanced therefore keeps them in buffers, in the layout that attention reads, and only adds the new tokens. The
pool stays complete, so a tile can be dropped at any time.

On CUDA a step has no tiles but a plan (`ramify.model.kernels.attention_plan`), whose kernels read the pool themselves.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.core.errors import ModelUnsupported
from ramify.model.kernels.state_pool import StatePool

SPARE_KEYS = 128  # keys that a tile's buffers can hold beyond those at the start
PRETOUCH_BYTES = 1 << 30  # bytes of the cache that are allocated at the start on a CPU; the rest as it is used
KEY_MULTIPLE = 16  # attention reads buffered keys in multiples of this


class KVPool:
    """The key-value memory of all layers, in blocks of `block_size` tokens.

    `layers` are [blocks, block_size * token_width]; `slots` are views of them, [tokens, token_width], where a row holds
    the keys and then the values of a token. `layer_addresses` is a C array of pointers to the layers. Only layers with
    attention have memory: `layer_index` maps the number of a layer in the model to its index here. By default the
    model has only such layers.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Any,
        model_layers: Sequence[int] | None = None,
    ) -> None:
        self.layer_index = {layer: index for index, layer in enumerate(model_layers or range(num_layers))}
        self.block_size, self.num_kv_heads, self.head_dim = block_size, num_kv_heads, head_dim
        self.token_width = 2 * num_kv_heads * head_dim
        shape = (num_blocks, block_size * self.token_width)
        pretouch_bytes = PRETOUCH_BYTES // num_layers
        self.layers = [
            _allocate_zeros(shape, dtype, torch.device(device), pretouch_bytes=pretouch_bytes)
            for _ in range(num_layers)
        ]
        self.bytes_per_token = num_layers * self.token_width * dtype.itemsize
        self.slots = [layer.view(num_blocks * block_size, self.token_width) for layer in self.layers]
        self.layer_addresses = (ctypes.c_void_p * num_layers)(*(layer.data_ptr() for layer in self.layers))


def _allocate_zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, pretouch_bytes: int) -> Tensor:
    """Allocate zeros, on Linux in huge pages: attention jumps between blocks, which is slow with small pages.

    The kernel allocates a page when it is touched; the first `pretouch_bytes` are touched here, so that no step waits.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, shape[0] * shape[1] * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(memory, dtype=dtype)
    zeros[: pretouch_bytes // dtype.itemsize : mmap.PAGESIZE // dtype.itemsize] = 0
    return zeros.view(shape)


@dataclass(slots=True)
class AttentionTile:
    """Rows [start, stop) of a step: the new tokens of `num_sequences` sequences, padded to equal numbers."""

    start: int
    stop: int
    num_sequences: int
    queries_per_sequence: int
    block_table: Tensor  # [num_sequences * blocks per sequence]
    query_positions: Tensor  # [num_sequences, queries_per_sequence]; a query sees keys up to its position
    pad_index: Tensor | None = None  # [num_sequences * queries_per_sequence] row of each query, if sequences are padded
    unpad_index: Tensor | None = None  # [stop - start] query of each row, the inverse
    lengths: Tensor | None = None  # [num_sequences] number of new tokens, if sequences are padded
    state_slots: Tensor | None = None  # [num_sequences] slots of the recurrent states, if the model has such layers
    masks: dict[int, Tensor] = field(default_factory=dict)  # by sliding window, 0 is none
    max_keys: int = 0  # visible keys of the longest sequence
    buffer_len: int = 0  # keys that the buffers can hold; 0 means that there are none
    kv_buffers: dict[int, Tensor] = field(default_factory=dict)  # layer: [2, sequences, kv_heads, buffer_len, head_dim]
    buffer_slots: Tensor | None = None  # where the new tokens go in the buffer of a layer, once it is filled

    def advance(self, max_keys: int, pool: "KVPool", max_buffer_bytes: int) -> bool:
        """Move to the next token of every sequence, at `query_positions`; return False if the buffers are too small.

        The first call decides on buffers: the tile has them if they take at most `max_buffer_bytes`.
        """
        self.max_keys, old_mask, self.masks = max_keys, self.masks.get(0), {}
        if not self.kv_buffers:
            buffer_len = -(-(max_keys + SPARE_KEYS) // pool.block_size) * pool.block_size
            fits = self.num_sequences * buffer_len * pool.bytes_per_token <= max_buffer_bytes
            self.buffer_len = buffer_len if fits else 0
            return True
        if max_keys > self.buffer_len:
            return False
        positions = self.query_positions.view(-1, 1, 1)
        if old_mask is not None:
            self.masks[0] = old_mask.scatter_(3, positions.unsqueeze(-1), 0.0)
        sequence = torch.arange(self.num_sequences, device=positions.device).view(-1, 1, 1)
        key_or_value = torch.arange(2, device=positions.device).view(1, -1, 1)
        head = torch.arange(pool.num_kv_heads, device=positions.device)
        buffer_start = ((key_or_value * self.num_sequences + sequence) * pool.num_kv_heads + head) * self.buffer_len
        self.buffer_slots = (buffer_start + positions).view(-1)
        return True

    def get_mask(self, window: int, num_keys: int, heads_per_kv_head: int, dtype: torch.dtype) -> Tensor:
        """Return the mask, 0 for visible keys and -inf for others, built once per step and window.

        Its shape is [num_sequences, 1, heads_per_kv_head * queries_per_sequence, num_keys], or with one query per
        sequence [num_sequences, 1, 1, num_keys].
        """
        if window not in self.masks:
            key = torch.arange(num_keys, device=self.query_positions.device)
            position = self.query_positions.unsqueeze(-1)
            masked = key > position
            if window:
                masked = masked | (key <= position - window)
            mask = torch.zeros(masked.shape, dtype=dtype, device=key.device).masked_fill_(masked, float("-inf"))
            mask = mask.unsqueeze(1)
            self.masks[window] = mask.repeat(1, 1, heads_per_kv_head, 1) if self.queries_per_sequence > 1 else mask
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The rows of a step as recurrent layers read them on a GPU: runs of adjacent rows, each with its state.

    Long sequences are computed in chunks (`ramify.model.kernels.chunk_plan`).
    """

    row_sequence: Tensor  # [rows] index of the row's sequence; -1 for padding
    start: Tensor  # [sequences] first row
    stop: Tensor  # [sequences] row after the last; an unused sequence has no rows
    state_slot: Tensor  # [sequences]
    chunks: Tensor  # [chunks, 3] first row, row after the last, and the slot of the state after a last chunk, else -1
    # [chunks, 3] of each long sequence: its first chunk, the chunk after its last, its slot; unused rows are 0, 0, -1
    tracks: Tensor


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan on the GPU, the positions of the rows, and the kernels that read both (a `PagedAttention`).

    `sequences` are set if the model has recurrent layers.
    """

    data: Tensor
    positions: Tensor
    kernels: Callable[..., Tensor]
    sequences: StepSequences | None = None


@dataclass(slots=True)
class AttentionMetadata:
    """What attention needs to know about one step, as vLLM's class of the same name: its tiles, or its plan."""

    pool: KVPool
    slot_mapping: Tensor  # [rows] slot of each new token's keys and values
    tiles: list[AttentionTile] = field(default_factory=list)
    plan: DevicePlan | None = None
    states: StatePool | None = None  # of the recurrent layers, if the model has such layers
    last_layer: int = -1  # the last layer that has computed attention

    def attend(
        self,
        query: Tensor,
        layer_index: int,
        scaling: float | None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of [rows, heads, head_dim] queries to the cache, which has the rows' own keys.

        `softcap` limits scores with a tanh; `sinks` [heads] are the scores of a key with the value 0.
        """
        if self.plan is None:
            outputs = [
                attend_tile(self, tile, layer_index, query[tile.start : tile.stop], scaling, window, softcap, sinks)
                for tile in self.tiles
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        plan, slots = self.plan, self.pool.slots[layer_index]
        scale = self.pool.head_dim**-0.5 if scaling is None else scaling
        options = {"scaling": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return plan.kernels(query, slots, plan.data, plan.positions, **options)


def write_kv(attn_metadata: AttentionMetadata, layer_index: int, key_value: Tensor) -> None:
    """Store the new tokens' keys and values, [rows, 2 * num_kv_heads * head_dim]."""
    pool = attn_metadata.pool
    pool.slots[layer_index].index_copy_(0, attn_metadata.slot_mapping, key_value)
    for tile in attn_metadata.tiles:
        if tile.buffer_slots is not None:
            new = key_value[tile.start : tile.stop].reshape(-1, pool.head_dim)
            tile.kv_buffers[layer_index].view(-1, pool.head_dim).index_copy_(0, tile.buffer_slots, new)


def attend_tile(
    attn_metadata: AttentionMetadata,
    tile: AttentionTile,
    layer_index: int,
    query: Tensor,
    scaling: float | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of one tile's queries."""
    pool = attn_metadata.pool
    kv_heads, sequences, queries = pool.num_kv_heads, tile.num_sequences, tile.queries_per_sequence
    heads_per_kv_head = query.shape[1] // kv_heads
    get_kv = _get_buffered_kv if tile.buffer_len else _gather_kv
    key, value, num_keys = get_kv(pool, tile, layer_index)
    mask = tile.get_mask(window, num_keys, heads_per_kv_head, query.dtype)[..., : key.shape[2]]
    if queries == 1:
        folded = query.reshape(sequences, kv_heads, heads_per_kv_head, pool.head_dim)
        out = _attend_dense(folded, key, value, mask, scaling, softcap, sinks)
        return out.reshape(sequences, kv_heads * heads_per_kv_head, pool.head_dim)
    if tile.pad_index is not None:
        query = query.index_select(0, tile.pad_index)
    folded = query.view(sequences, queries, kv_heads, heads_per_kv_head, pool.head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, heads_per_kv_head * queries, pool.head_dim)
    out = _attend_dense(folded, key, value, mask, scaling, softcap, sinks)
    out = out.view(sequences, kv_heads, heads_per_kv_head, queries, pool.head_dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(sequences * queries, kv_heads * heads_per_kv_head, pool.head_dim)
    return out if tile.unpad_index is None else out.index_select(0, tile.unpad_index)


def _attend_dense(
    query: Tensor,  # [sequences, kv_heads, heads per kv head * queries, head_dim]
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of a tile; with a soft cap or sinks by its formula, in float32."""
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores += mask
    largest = scores.amax(-1, keepdim=True)
    sink_weight = 0.0
    if sinks is not None:
        sink = sinks.float().view(key.shape[1], -1, 1)  # [kv_heads, heads per kv head, queries]
        sink = sink.expand(-1, -1, query.shape[2] // sink.shape[1]).reshape(1, *scores.shape[1:3], 1)
        largest = torch.maximum(largest, sink)
        sink_weight = (sink - largest).exp()
    weights = (scores - largest).exp_()
    weights /= weights.sum(-1, keepdim=True) + sink_weight
    return weights.to(value.dtype) @ value


def _gather_kv(pool: KVPool, tile: AttentionTile, layer_index: int) -> tuple[Tensor, Tensor, int]:
    """Gather keys and values of the tile's sequences from the pool.

    Returns views of [num_sequences, num_kv_heads, keys, head_dim], and the number of keys.
    """
    rows = pool.layers[layer_index].index_select(0, tile.block_table)
    key_value = rows.view(tile.num_sequences, -1, 2, pool.num_kv_heads, pool.head_dim)
    key, value = key_value.permute(2, 0, 3, 1, 4).unbind(0)
    return key, value, key.shape[2]


def _get_buffered_kv(pool: KVPool, tile: AttentionTile, layer_index: int) -> tuple[Tensor, Tensor, int]:
    """Return the same from the tile's buffer, which is filled from the pool the first time."""
    buffer = tile.kv_buffers.get(layer_index)
    if buffer is None:
        key, value, num_keys = _gather_kv(pool, tile, layer_index)
        buffer = key.new_zeros(2, tile.num_sequences, pool.num_kv_heads, tile.buffer_len, pool.head_dim)
        buffer[0, :, :, :num_keys], buffer[1, :, :, :num_keys] = key, value
        tile.kv_buffers[layer_index] = buffer
    num_read = -(-tile.max_keys // KEY_MULTIPLE) * KEY_MULTIPLE
    key, value = buffer[:, :, :, :num_read].unbind(0)
    return key, value, tile.buffer_len


def paged_attention(
    module: Any,
    query: Tensor,  # [sequences, heads, tokens, head_dim]; in a flat row, one sequence
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attn_metadata: AttentionMetadata | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this in every layer, with the `attn_metadata` that the forward got.

    `softcap` limits scores with a tanh; `s_aux` are the attention sinks of the heads.
    """
    if attn_metadata is None:
        raise unsupported_attention(module, "did not pass the attention metadata on to its attention function")
    reject_unsupported_arguments(module, attention_mask, kwargs)
    pool = attn_metadata.pool
    expected, actual = (pool.num_kv_heads, pool.head_dim), [(kv.shape[1], kv.shape[3]) for kv in (key, value)]
    if actual != [expected] * 2:
        problem = f"expected keys and values of (heads, width) {expected}, got {actual}"
        raise unsupported_attention(module, f"has heads that differ from its config: {problem}")
    layer_index = pool.layer_index[module.layer_idx]
    if layer_index <= attn_metadata.last_layer:  # it would overwrite its keys
        raise unsupported_attention(module, "computes attention twice in a layer, which the paged cache cannot hold")
    attn_metadata.last_layer = layer_index
    sequences, _, tokens, _ = query.shape
    key_value = torch.stack((key, value)).permute(1, 3, 0, 2, 4)  # [sequences, tokens, 2, kv_heads, head_dim]
    write_kv(attn_metadata, layer_index, key_value.reshape(sequences * tokens, -1))
    window = kwargs.get("sliding_window") or 0
    rows = query.transpose(1, 2).flatten(0, 1)
    out = attn_metadata.attend(rows, layer_index, scaling, window, softcap or 0.0, s_aux)
    return out.unflatten(0, (sequences, tokens)).contiguous(), None


def reject_unsupported_arguments(module: Any, mask: Tensor | None, kwargs: Mapping[str, Any]) -> None:
    """Reject models that add to their scores, build their own mask or attend to later tokens.

    Which token sees which is passed to our attention functions by other arguments; transformers passes no mask to them.
    """
    if kwargs.get("position_bias") is not None:
        raise unsupported_attention(module, "uses position_bias, which our attention does not support")
    if mask is not None:
        raise unsupported_attention(module, "builds its own attention mask, which our attention does not read")
    if getattr(module, "is_causal", None) is False:
        raise unsupported_attention(module, "attends to later tokens, which our attention does not support")


def unsupported_attention(module: Any, problem: str) -> ModelUnsupported:
    """Return the error for an attention module that our attention functions cannot replace."""
    return ModelUnsupported(f"{type(module).__name__} {problem}")
