"""The decoder step in C (`decoder.c`), for float32 on CPUs.

On a small model the PyTorch calls cost as much as the matrix products in them. Here a step is one call, compiled for
the model's shape when it is loaded (half a second). Matrix products use torch's own BLAS, and attention reads
keys and values in place from the cache instead of gathering them. Both run on torch's threads; the other operators,
which take little time, run on one thread.
"""

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ramify.model.kernels.cpu.c_library import (
    CLibraryUnavailable,
    declare_arguments,
    find_torch_symbol,
    load_c_library,
    read_cpu_features,
)
from ramify.model.kernels.decoder_ops import (
    AdapterWeights,
    DecoderOps,
    DecoderSizes,
    DecoderWeights,
    LayerWeights,
    Matrix,
)
from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile, attend_tile
from ramify.model.kernels.quantization import QuantizedMatrix

ROWS_PER_CHUNK = 64  # rows that go through a layer together in C; the result of a row may depend on this number
MAX_PER_QUERY_KEYS = 256  # with more keys, PyTorch computes several queries of a sequence together


class CompiledDecoderOps(DecoderOps):
    """The operators in C, and sampling, for float32 weights in CPU memory. Raises CLibraryUnavailable."""

    def __init__(self, sizes: DecoderSizes, weights: DecoderWeights) -> None:
        check_placement(weights, torch.float32)
        if weights.rope_table.shape[1] < 2 * sizes.head_dim or not all(layer.has_rope for layer in weights.layers):
            raise CLibraryUnavailable("not all of a head is rotated in every layer")
        super().__init__(sizes, "compiled")
        self.qkv_width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.attention_width = sizes.heads * sizes.head_dim
        definitions = (f"{name.upper()}={_c_literal(getattr(sizes, name))}" for name in DecoderSizes.__slots__)
        library = load_c_library(
            Path(__file__).with_name("decoder.c"), *definitions, f"ROWS_PER_CHUNK={ROWS_PER_CHUNK}"
        )
        self._sgemm = find_torch_symbol("sgemm_")
        threads = torch.get_num_threads()
        self._parallel_arguments = (find_torch_symbol("GOMP_parallel") if threads > 1 else None), threads
        self._c_norm = declare_arguments(library.norm_rows, "pppi")
        self._c_project_qkv = declare_arguments(library.project_qkv, "pppppppi")
        self._c_attend = declare_arguments(library.attend, "pipppiippipi")
        self._c_project_out_and_mlp = declare_arguments(library.project_out_and_mlp, "ppppi")
        self._c_forward = declare_arguments(library.forward, "ppippiipppppiippiipip")
        self._c_sample_tokens = declare_arguments(library.sample_tokens, "piipppp")
        self._layer_addresses = {id(layer): _tensor_addresses(layer) for layer in weights.layers}
        layers = (ctypes.c_void_p * len(self._layer_addresses))(*map(ctypes.addressof, self._layer_addresses.values()))
        model_arguments = _tensor_addresses(weights), layers, len(layers), len(weights.head)
        self._forward_arguments = self._sgemm, *self._parallel_arguments, *model_arguments
        self._draw_buffers: DrawBuffers | None = None

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of each row."""
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
        """Return the logits of `logit_rows`, in one C call if one tile holds all queries."""
        tile = attn_metadata.tiles[0]
        if len(attn_metadata.tiles) > 1 or not _prefers_per_query(attn_metadata, tile):
            return super().forward(weights, ids, positions, attn_metadata, logit_rows)
        logits = weights.head.new_empty(len(logit_rows), len(weights.head))
        pool, slot_mapping = attn_metadata.pool.layer_addresses, attn_metadata.slot_mapping.data_ptr()
        inputs = pool, ids.data_ptr(), positions.data_ptr(), slot_mapping
        outputs = len(ids), logit_rows.data_ptr(), len(logit_rows), logits.data_ptr()
        tile_arguments = self._tile_arguments(attn_metadata, tile)
        self._c_forward(*self._forward_arguments, *inputs, *tile_arguments, *outputs)
        return logits

    def project_qkv(
        self, layer: LayerWeights, hidden: Tensor, rope: Tensor, attn_metadata: AttentionMetadata, layer_index: int
    ) -> Tensor:
        """Compute queries, keys and values of a layer, and write keys and values to the pool."""
        rows = hidden.shape[0]
        qkv = hidden.new_empty(rows, self.qkv_width)
        pool, slot_mapping = attn_metadata.pool.layers[layer_index].data_ptr(), attn_metadata.slot_mapping.data_ptr()
        inputs = hidden.data_ptr(), rope.data_ptr(), slot_mapping, pool
        self._c_project_qkv(self._sgemm, self._layer_addresses[id(layer)], *inputs, qkv.data_ptr(), rows)
        return qkv

    def attend(self, qkv: Tensor, attn_metadata: AttentionMetadata, layer_index: int) -> Tensor:
        """Compute the attention of each tile with the kernel that suits it."""
        out = qkv.new_empty(qkv.shape[0], self.attention_width)
        pool = attn_metadata.pool.layers[layer_index].data_ptr()
        for tile in attn_metadata.tiles:
            if not _prefers_per_query(attn_metadata, tile):
                query = self._get_queries(qkv[tile.start : tile.stop])
                tile_output = attend_tile(attn_metadata, tile, layer_index, query, self.sizes.scaling)
                out[tile.start : tile.stop] = tile_output.flatten(1)
                continue
            tile_qkv = qkv.data_ptr() + 4 * tile.start * self.qkv_width
            tile_out = out.data_ptr() + 4 * tile.start * self.attention_width
            tile_arguments = self._tile_arguments(attn_metadata, tile)
            self._c_attend(*self._parallel_arguments, tile_qkv, pool, *tile_arguments, tile_out, tile.stop - tile.start)
        return out

    def _tile_arguments(self, attn_metadata: AttentionMetadata, tile: AttentionTile) -> tuple[Any, ...]:
        """Return the arguments of C attention that describe a tile."""
        query_of_row = None if tile.unpad_index is None else tile.unpad_index.data_ptr()
        return (
            tile.block_table.data_ptr(),
            tile.block_table.shape[0] // tile.num_sequences,
            attn_metadata.pool.block_size,
            tile.query_positions.data_ptr(),
            query_of_row,
            tile.queries_per_sequence,
        )

    def project_out_and_mlp(self, layer: LayerWeights, attn_output: Tensor, hidden: Tensor) -> Tensor:
        """Apply the output projection and the MLP of a layer to `hidden`, in place."""
        addresses = self._layer_addresses[id(layer)]
        self._c_project_out_and_mlp(self._sgemm, addresses, attn_output.data_ptr(), hidden.data_ptr(), hidden.shape[0])
        return hidden

    def sample_tokens(
        self, logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
    ) -> tuple[list[int], list[float]]:
        """Return a token for each row, sampled by seed and position like `ramify.infer.sampler`, and its logprob."""
        buffers = self._draw_buffers
        if buffers is None or (buffers.temperatures, buffers.seeds) != (temperatures, seeds):
            buffers = self._draw_buffers = DrawBuffers(temperatures, seeds)  # most steps reuse the last step's
        buffers.positions[:] = positions
        self._c_sample_tokens(logits.data_ptr(), *logits.shape, *buffers.addresses)
        return buffers.tokens.tolist(), buffers.logprobs.tolist()


class DrawBuffers:
    """The arrays that `sample_tokens` in C reads (temperatures, seeds, positions) and writes (tokens, logprobs)."""

    def __init__(self, temperatures: list[float], seeds: list[int]) -> None:
        self.temperatures, self.seeds = temperatures, seeds
        temperature_array = np.array(temperatures, np.float32)
        seeds_and_positions = np.array([seeds, seeds], np.uint64)
        self.positions = seeds_and_positions[1]
        self.tokens, self.logprobs = np.empty(len(seeds), np.int64), np.empty(len(seeds), np.float32)
        self._arrays = temperature_array, seeds_and_positions, self.tokens, self.logprobs
        self.addresses = [array.ctypes.data for array in self._arrays]


def _prefers_per_query(attn_metadata: AttentionMetadata, tile: AttentionTile) -> bool:
    """Return whether computing the queries of a tile one by one is fast."""
    keys = tile.block_table.shape[0] // tile.num_sequences * attn_metadata.pool.block_size
    return tile.queries_per_sequence == 1 or keys <= MAX_PER_QUERY_KEYS


def check_placement(weights: DecoderWeights, dtype: torch.dtype) -> None:
    """Raise CLibraryUnavailable unless the weights are of `dtype` in CPU memory."""
    actual = weights.norm
    if actual.dtype != dtype or actual.device.type != "cpu":
        raise CLibraryUnavailable(f"{str(actual.dtype).removeprefix('torch.')} on {actual.device.type}")
    if any(isinstance(matrix, QuantizedMatrix) for layer in weights.layers for matrix in layer.matrices):
        raise CLibraryUnavailable("the weights are quantized")


def _c_literal(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value!r}f"


class CAdapterWeights(ctypes.Structure):
    """The struct AdapterWeights in C."""

    _fields_: ClassVar = [("down", ctypes.c_void_p), ("up", ctypes.c_void_p), ("rank", ctypes.c_int64)]


def _tensor_addresses(weights: LayerWeights | DecoderWeights) -> Any:
    """Return the addresses of the tensors in the order of the C struct. They stay valid: updates are in place."""
    values = [getattr(weights, name) for name in weights.__slots__]
    adapters = [
        CAdapterWeights(value.down.data_ptr(), value.up.data_ptr(), len(value.up))
        if isinstance(value, AdapterWeights)
        else None
        for value in values
    ]
    addresses = [
        ctypes.addressof(adapter) if adapter else value.data_ptr() if isinstance(value, Tensor) else None
        for value, adapter in zip(values, adapters)
    ]
    struct: Any = (ctypes.c_void_p * len(addresses))(*addresses)
    struct.adapters = adapters  # which the struct refers to only by address
    return struct


MAX_ROWS = 4  # with twice as many rows torch is as fast
WIDTH_MULTIPLE = 32  # widths of matrices must be multiples of this


class SmallGemmDecoderOps(DecoderOps):
    """PyTorch operators with products of at most `MAX_ROWS` bfloat16 rows in C. Raises CLibraryUnavailable.

    With one request at a time only memory bandwidth matters, of which torch's product reaches half or less. The C code
    (`small_gemm.c`) needs AVX512-BF16 and uses torch's own threads.
    """

    def __init__(self, sizes: DecoderSizes, weights: DecoderWeights) -> None:
        check_placement(weights, torch.bfloat16)
        if not any("avx512_bf16" in line for line in read_cpu_features()):
            raise CLibraryUnavailable("no AVX512-BF16")
        if any(width % WIDTH_MULTIPLE for width in (sizes.hidden, sizes.heads * sizes.head_dim, sizes.inner)):
            raise CLibraryUnavailable(f"a width is not a multiple of {WIDTH_MULTIPLE}")
        super().__init__(sizes, "torch, compiled for few rows")
        self._gomp_parallel = find_torch_symbol("GOMP_parallel")
        library = load_c_library(Path(__file__).with_name("small_gemm.c"), f"MAX_ROWS={MAX_ROWS}")
        self._c_matmul = declare_arguments(library.matmul, "pippppiii")

    def matmul(self, rows: Tensor, weight: Matrix, addend: Tensor | None = None) -> Tensor:
        """Multiply a few rows with a weight in C; other sizes are left to the base class."""
        assert isinstance(weight, Tensor)  # `check_placement` has found no quantized ones
        count, width = rows.shape
        if not 0 < count <= MAX_ROWS:  # 0 if a chunk of a prompt is computed and nothing is sampled
            return super().matmul(rows, weight, addend)
        rows, out = rows.contiguous(), rows.new_empty(count, weight.shape[1])
        addresses = rows.data_ptr(), weight.data_ptr(), None if addend is None else addend.data_ptr(), out.data_ptr()
        self._c_matmul(self._gomp_parallel, torch.get_num_threads(), *addresses, count, width, out.shape[1])
        return out
