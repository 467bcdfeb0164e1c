"""A step of a decoder, and the parts it consists of, twice.

`Operators` are torch calls, for every device and type. On a small model those calls cost as much as the products in
them, so for one CPU thread in float32 there is `Compiled`: the same in C, one call a step, compiled for the model's
shape when it is loaded (half a second). Its matrix products are those of torch's own library, and its attention reads
keys and values where they lie in the pool instead of gathering them. Without a C compiler, or if anything about it
fails, the torch calls do, and `note` says why.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.native import CLibraryUnavailable, declare_arguments, find_torch_symbol, load_c_library
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, attend_tile, write_kv

ROWS_PER_CHUNK = 64  # rows that go through a layer together in C; what a row becomes may depend on their number
MAX_PER_QUERY_KEYS = 256  # up to which several queries of a sequence are answered one by one


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What the operators of a model have in common, by the names they have in C."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    eps: float
    scaling: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's tensors; matrices are [in, out]."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What lies around the layers, and they."""

    embedding: Tensor  # [vocab, hidden]
    rope_table: Tensor  # [positions, 2 * head_dim], cosines and sines; half of the sines negated for `roll`
    norm: Tensor
    head: Tensor  # [vocab, hidden]
    head_bias: Tensor | None
    layers: Sequence[LayerWeights]


class DecoderOps:
    """`forward` is a step; in it a layer is `begin`, `attend`, `finish`."""

    def __init__(self, sizes: DecoderSizes, description: str = "torch") -> None:
        self.sizes, self.description = sizes, description

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square in float32, as the models do it."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.sizes.eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.sizes.eps).rsqrt_()
        return (hidden * scale).to(hidden.dtype).mul_(weight)

    def matmul(self, rows: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
        """[rows, in] times [in, out], on top of `onto` if there is something."""
        return torch.mm(rows, weight) if addend is None else torch.addmm(addend, rows, weight)

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        """Logits of `rows`, an ascending part of the step's, [len(rows), vocab]."""
        hidden, turns = F.embedding(ids, weights.embedding), F.embedding(positions, weights.rope_table)
        *lower, top = weights.layers
        for number, layer in enumerate(lower):
            qkv = self.project_qkv(layer, hidden, turns, attn_metadata, number)
            hidden = self.project_out_and_mlp(layer, self.attend(qkv, attn_metadata, number), hidden)
        found = self.attend(self.project_qkv(top, hidden, turns, attn_metadata, len(lower)), attn_metadata, len(lower))
        if len(logit_rows) < len(hidden):  # of the others only keys and values were wanted
            found, hidden = found.index_select(0, logit_rows), hidden.index_select(0, logit_rows)
        hidden = self.project_out_and_mlp(top, found, hidden)
        logits = self.matmul(self.norm(hidden, weights.norm), weights.head.t())
        return logits if weights.head_bias is None else logits + weights.head_bias

    def project_qkv(
        self, layer: LayerWeights, hidden: Tensor, rope: Tensor, attn_metadata: AttentionMetadata, layer_index: int
    ) -> Tensor:
        """Queries, keys and values, the first two rotated by `turns`, [rows, 2 * head_dim]; the last two stored."""
        heads, kv_heads, head_dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        qkv = self.matmul(self.norm(hidden, layer.norm), layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(qkv, layer.q_norm, layer.k_norm)
        cos, sin = rope.unsqueeze(1).chunk(2, -1)
        qk = qkv[:, : (heads + kv_heads) * head_dim].view(-1, heads + kv_heads, head_dim)
        torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin, out=qk)
        write_kv(attn_metadata, layer_index, qkv[:, heads * head_dim :])
        return qkv

    def attend(self, qkv: Tensor, attn_metadata: AttentionMetadata, layer_index: int) -> Tensor:
        """What the queries find in the pool, [rows, heads * head_dim]."""
        parts = [self._attend_tile(qkv, attn_metadata, tile, layer_index) for tile in attn_metadata.tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def project_out_and_mlp(self, layer: LayerWeights, attn_output: Tensor, hidden: Tensor) -> Tensor:
        """`hidden` with what attention found and what the MLP makes of both added to it."""
        hidden = self.matmul(attn_output, layer.out, hidden)
        if layer.out_bias is not None:
            hidden += layer.out_bias
        gate, up = self.matmul(self.norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return self.matmul(F.silu(gate).mul_(up), layer.down, hidden)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        sizes = self.sizes
        heads = qkv.view(qkv.shape[0], -1, sizes.head_dim)
        for weight, start, count in ((q_norm, 0, sizes.heads), (k_norm, sizes.heads, sizes.kv_heads)):
            part = heads[:, start : start + count]
            normed = self.norm(part.reshape(-1, sizes.head_dim), weight)
            part.copy_(normed.view(part.shape))

    def _attend_tile(
        self, qkv: Tensor, attn_metadata: AttentionMetadata, tile: AttentionTile, layer_index: int
    ) -> Tensor:
        sizes = self.sizes
        query = qkv[tile.start : tile.stop, : sizes.heads * sizes.head_dim].view(-1, sizes.heads, sizes.head_dim)
        return attend_tile(attn_metadata, tile, layer_index, query, sizes.scaling).reshape(query.shape[0], -1)


class CompiledDecoderOps(DecoderOps):
    """The same in C, and drawing tokens; only for contiguous float32 in the memory of the CPU."""

    def __init__(self, sizes: DecoderSizes, weights: DecoderWeights) -> None:
        super().__init__(sizes, "compiled")
        self.qkv_width, self.attention_width = (
            (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim,
            sizes.heads * sizes.head_dim,
        )
        shape = (f"{name.upper()}={_c_literal(getattr(sizes, name))}" for name in DecoderSizes.__slots__)
        made = load_c_library(Path(__file__).with_name("operators.c"), *shape, f"ROWS={ROWS_PER_CHUNK}")
        self._sgemm = find_torch_symbol("sgemm_")
        self._c_norm = declare_arguments(made.norm_rows, "pppi")
        self._c_project_qkv = declare_arguments(made.begin, "pppppppi")
        self._c_attend = declare_arguments(made.attend, "pppiippipi")
        self._c_project_out_and_mlp = declare_arguments(made.finish, "ppppi")
        self._c_forward = declare_arguments(made.forward, "pppiipppppiippiipip")
        self._c_sample_tokens = declare_arguments(made.draw, "piipppp")
        self._layer_addresses = {id(layer): _tensor_addresses(layer) for layer in weights.layers}
        layers = (ctypes.c_void_p * len(self._layer_addresses))(*map(ctypes.addressof, self._layer_addresses.values()))
        self._model_arguments = _tensor_addresses(weights), layers, len(layers), len(weights.head)
        self._draw_buffers: DrawBuffers | None = None

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        self._c_norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), hidden.shape[0])
        return out

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        if len(attn_metadata.tiles) > 1 or not _prefers_per_query(attn_metadata, attn_metadata.tiles[0]):
            return super().forward(weights, ids, positions, attn_metadata, logit_rows)
        logits = weights.head.new_empty(len(logit_rows), len(weights.head))
        begins = (
            attn_metadata.pool.layer_addresses,
            ids.data_ptr(),
            positions.data_ptr(),
            attn_metadata.slot_mapping.data_ptr(),
        )
        ends = len(ids), logit_rows.data_ptr(), len(logit_rows), logits.data_ptr()
        self._c_forward(
            self._sgemm,
            *self._model_arguments,
            *begins,
            *self._tile_arguments(attn_metadata, attn_metadata.tiles[0]),
            *ends,
        )
        return logits

    def project_qkv(
        self, layer: LayerWeights, hidden: Tensor, rope: Tensor, attn_metadata: AttentionMetadata, layer_index: int
    ) -> Tensor:
        rows = hidden.shape[0]
        qkv = hidden.new_empty(rows, self.qkv_width)
        ends = (
            hidden.data_ptr(),
            rope.data_ptr(),
            attn_metadata.slot_mapping.data_ptr(),
            attn_metadata.pool.layers[layer_index].data_ptr(),
        )
        self._c_project_qkv(self._sgemm, self._layer_addresses[id(layer)], *ends, qkv.data_ptr(), rows)
        return qkv

    def attend(self, qkv: Tensor, attn_metadata: AttentionMetadata, layer_index: int) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self.attention_width)
        pool = attn_metadata.pool.layers[layer_index].data_ptr()
        for tile in attn_metadata.tiles:
            if not _prefers_per_query(attn_metadata, tile):
                out[tile.start : tile.stop] = self._attend_tile(qkv, attn_metadata, tile, layer_index)
                continue
            begin, end = (
                qkv.data_ptr() + 4 * tile.start * self.qkv_width,
                out.data_ptr() + 4 * tile.start * self.attention_width,
            )
            self._c_attend(begin, pool, *self._tile_arguments(attn_metadata, tile), end, tile.stop - tile.start)
        return out

    def _tile_arguments(self, attn_metadata: AttentionMetadata, tile: AttentionTile) -> tuple[Any, ...]:
        """What attention in C has to know of a tile."""
        most, places = (
            tile.block_table.shape[0] // tile.num_sequences,
            None if tile.unpad_index is None else tile.unpad_index.data_ptr(),
        )
        return (
            tile.block_table.data_ptr(),
            most,
            attn_metadata.pool.block_size,
            tile.query_positions.data_ptr(),
            places,
            tile.queries_per_sequence,
        )

    def project_out_and_mlp(self, layer: LayerWeights, attn_output: Tensor, hidden: Tensor) -> Tensor:
        table = self._layer_addresses[id(layer)]
        self._c_project_out_and_mlp(self._sgemm, table, attn_output.data_ptr(), hidden.data_ptr(), hidden.shape[0])
        return hidden

    def sample_tokens(
        self, logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
    ) -> tuple[list[int], list[float]]:
        """A token for each row, chosen by its seed and position, and its logprob; as the engine's sampler does it."""
        if self._draw_buffers is None or (self._draw_buffers.temperatures, self._draw_buffers.seeds) != (
            temperatures,
            seeds,
        ):
            self._draw_buffers = DrawBuffers(temperatures, seeds)  # most steps ask for the same as the one before
        chances = self._draw_buffers
        chances.positions[:] = positions
        self._c_sample_tokens(logits.data_ptr(), *logits.shape, *chances.addresses)
        return chances.tokens.tolist(), chances.logprobs.tolist()


class DrawBuffers:
    """What tokens are drawn by, and those that are drawn, where C reads and writes them."""

    def __init__(self, temperatures: list[float], seeds: list[int]) -> None:
        self.temperatures, self.seeds = temperatures, seeds
        heat, given = np.array(temperatures, np.float32), np.array([seeds, seeds], np.uint64)
        self.positions = given[1]
        self.tokens, self.logprobs = np.empty(len(seeds), np.int64), np.empty(len(seeds), np.float32)
        self._keepalive = heat, given
        self.addresses = [array.ctypes.data for array in (heat, given, self.tokens, self.logprobs)]


def _prefers_per_query(attn_metadata: AttentionMetadata, tile: AttentionTile) -> bool:
    """Whether queries one by one are a good way to answer a tile."""
    return (
        tile.queries_per_sequence == 1
        or tile.block_table.shape[0] // tile.num_sequences * attn_metadata.pool.block_size <= MAX_PER_QUERY_KEYS
    )


def build_compiled_ops(sizes: DecoderSizes, weights: DecoderWeights) -> CompiledDecoderOps:
    """The operators in C for this model, or Unavailable, with the reason."""
    weight = weights.norm
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise CLibraryUnavailable(f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if torch.get_num_threads() > 1:
        raise CLibraryUnavailable(f"{torch.get_num_threads()} threads")
    return CompiledDecoderOps(sizes, weights)


def _c_literal(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value!r}f"


def _tensor_addresses(weights: LayerWeights | DecoderWeights) -> Any:
    """Where its tensors lie, in the order of the struct in C; they are updated in place."""
    values = [getattr(weights, name) for name in weights.__slots__]
    addresses = [value.data_ptr() if isinstance(value, Tensor) else None for value in values]
    return (ctypes.c_void_p * len(addresses))(*addresses)
