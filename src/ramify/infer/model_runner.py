"""Running scheduled chunks: from their tokens to logits, in one flat forward.

The tokens of all chunks are one row, sorted so that chunks which can share a tile are adjacent. Two chunks share a tile
if neither their new tokens nor their blocks differ by more than a factor of two, so padding at most doubles the work of
the smallest, and the number of tiles grows only with the logarithm of the lengths.

In `batch_invariant` mode the result of a token must not depend on the other tokens of the batch. Every token, of a
prompt or not, is a tile row of its own, the number of rows is fixed, and keys are padded to a multiple of a fixed
length: each operator then has the same shapes in every step, and a row has the same bits wherever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.core.errors import ModelUnsupported, RamifyError
from ramify.infer.images import ImageEncoder
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest
from ramify.infer.scheduler import ScheduledChunk
from ramify.model.device_memory import is_out_of_memory
from ramify.model.fused_model import FusedModel, build_hf_forward, build_image_forward
from ramify.model.images import ProcessedImage
from ramify.model.kernels.cpu.decoder import ROWS_PER_CHUNK, CompiledDecoderOps
from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile, KVPool
from ramify.model.kernels.state_pool import StatePool
from ramify.model.load import ATTENTION_NAME, LoadedModel
from ramify.model.logprob_check import (
    NUM_CHECK_TOKENS,
    build_check_ids,
    check_logprobs,
    compute_logprobs,
    compute_reference_logprobs,
    unsupported_error,
)

MIN_TILE_BLOCKS = 8  # sequences of at most this many blocks can always share a tile
MAX_KV_BUFFER_BYTES = 512 << 20  # gathered keys and values that tiles may keep from step to step
INVARIANT_KEY_MULTIPLE = 512  # keys are padded to a multiple of this in batch-invariant mode


@dataclass(slots=True)
class InputBatch:
    """The tensors of one step."""

    chunk_order: list[int]  # index of each row's chunk
    decoding_requests: list[EngineRequest]  # if every chunk is one token and needs logits; in order of the chunks
    starts: list[int]
    host_inputs: np.ndarray  # [3, rows]: ids, indices and slots; [6, rows] with the positions on a grid
    device_inputs: Tensor  # the same on the model's device; on a CPU the same memory
    input_ids: Tensor
    positions: Tensor
    attn_metadata: AttentionMetadata
    logit_rows: Tensor


class ImageRows(NamedTuple):
    """The rows of a step that are image tokens, and their features [1 + deepstack layers, image tokens, width]."""

    rows: Tensor
    features: Tensor


class ModelRunner:
    """Owns the model's KV pool and runs steps.

    Without a `fused_model` it runs the model's own code. `compiled_ops` are the operators in C, if they are used;
    `ops_description` names the operators for the log, with `ops_problem` if fused ones failed. `states` has the states
    of recurrent layers, if there are any.
    """

    def __init__(
        self,
        model: LoadedModel,
        counters: EngineCounters,
        *,
        num_blocks: int,
        block_size: int,
        fused_model: FusedModel | None = None,
        fixed_rows: int | None = None,
        feature_cache_bytes: int = 0,
        num_state_slots: int = 0,
        ops_problem: str | None = None,
    ) -> None:
        self.model, self.counters = model, counters
        self.states = StatePool(model.state_specs, num_state_slots, model.device) if model.state_specs else None
        self.image_encoder = ImageEncoder(model.tower, feature_cache_bytes, counters) if model.tower else None
        self.has_grid_positions = model.tower is not None and model.tower.has_grid_positions
        self.has_device_memory = model.device.type != "cpu"
        self.block_size = block_size
        self.fixed_rows = fixed_rows and -(-fixed_rows // ROWS_PER_CHUNK) * ROWS_PER_CHUNK
        shape = model.shape
        self.pool = KVPool(
            len(shape.kv_layers),
            num_blocks,
            block_size,
            shape.num_kv_heads,
            shape.head_dim,
            model.dtype,
            model.device,
            model_layers=shape.kv_layers,
        )
        self.fused_model, self.forward = fused_model, fused_model or build_hf_forward(model.module)
        self.forward_with_images = build_image_forward(model.module)
        ops = self.fused_model.ops if self.fused_model else None
        self.ops_description = ops.description if ops else "the model's own code"
        if ops_problem is not None:
            self.ops_description += f" (fused operators failed: {ops_problem})"
        self.compiled_ops = ops if isinstance(ops, CompiledDecoderOps) else None
        self.kv_buffer_bytes = 0 if self.compiled_ops else MAX_KV_BUFFER_BYTES  # attention in C reads the pool itself
        self._last_batch: InputBatch | None = None
        if self.fused_model is None:  # `build_fused_model` has checked a fused one
            self._check_model(min(NUM_CHECK_TOKENS, num_blocks * block_size, shape.max_positions))

    @torch.no_grad()
    def _check_model(self, num_tokens: int) -> None:
        """Raise ModelUnsupported unless a few tokens through the paged cache get the logprobs of the model itself."""
        module, device = self.model.module, self.model.device
        ids = build_check_ids(module.config, num_tokens).to(device)
        try:
            logits = self._compute_check_logits(ids)
        except RamifyError:
            raise
        except Exception as error:  # a model with another structure may fail anywhere
            if is_out_of_memory(error):
                raise
            raise unsupported_error("engine", module, error) from error
        if num_tokens > 1:
            expected = compute_reference_logprobs(module, ids, ATTENTION_NAME)
            check_logprobs("engine", module, expected, compute_logprobs(logits[:-1], ids[1:]))

    def _compute_check_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of a sequence through the paged cache."""
        positions = torch.arange(len(ids), device=ids.device)
        metadata = self._build_check_metadata(positions)
        logits = self.forward(ids, positions, metadata, positions)
        self._check_layers_attended(metadata)
        return logits

    def _check_layers_attended(self, metadata: AttentionMetadata) -> None:
        if metadata.last_layer < len(self.pool.layers) - 1:
            raise ModelUnsupported(
                f"{type(self.model.module).__name__} does not call its attention function, so it cannot read the paged "
                "cache"
            )

    def _build_check_metadata(self, positions: Tensor) -> AttentionMetadata:
        num_tokens = len(positions)
        block_table = torch.arange(-(-num_tokens // self.block_size), device=positions.device)
        tile = AttentionTile(0, num_tokens, 1, num_tokens, block_table, positions.unsqueeze(0))
        return AttentionMetadata(self.pool, positions, [tile])

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute the chunks; return them in the order of their rows, and the logits.

        A chunk that needs prompt logprobs has logits for every token, one that samples for its last, others none.
        """
        if self.fixed_rows is not None:
            return self._run_fixed(chunks, self.fixed_rows)
        batch = self._last_batch = self._advance_batch(chunks) or self._prepare_inputs(chunks)
        chunks_by_row = [chunks[index] for index in batch.chunk_order]
        images = self._gather_images(chunks_by_row)
        return chunks_by_row, self._forward(
            batch.input_ids, batch.positions, batch.attn_metadata, batch.logit_rows, images
        )

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
        images: ImageRows | None,
    ) -> Tensor:
        """Return the logits of `logit_rows`. Positions are [rows], or [3, rows] if image tokens lie on a grid."""
        if images is not None:
            return self.forward_with_images(ids, positions, attn_metadata, logit_rows, *images)
        text_positions = positions[0] if positions.dim() == 2 else positions  # all three are equal
        return self.forward(ids, text_positions, attn_metadata, logit_rows)

    def _gather_images(self, chunks: Sequence[ScheduledChunk]) -> ImageRows | None:
        """Return the image tokens of the chunks, which are in the order of the rows; None if there are none."""
        parts: list[tuple[ProcessedImage, int, int]] = []  # image, its first token in the chunk, the first after it
        rows: list[np.ndarray] = []
        first_row = 0
        for chunk in chunks:
            for item in chunk.request.images:
                indices = item.token_indices
                start, stop = np.searchsorted(indices, (chunk.start, chunk.stop)).tolist()
                if start < stop:
                    parts.append((item.image, start, stop))
                    rows.append(first_row + indices[start:stop] - chunk.start)
            first_row += chunk.num_tokens
        if not parts or self.image_encoder is None:
            return None
        features = self.image_encoder.get_features([image for image, _, _ in parts])
        gathered = [features[image.hash][:, start:stop] for image, start, stop in parts]
        return ImageRows(self._to_device(np.concatenate(rows)), torch.cat(gathered, dim=1))

    def _prepare_inputs(self, chunks: Sequence[ScheduledChunk]) -> "InputBatch":
        order = sorted(range(len(chunks)), key=lambda index: (chunks[index].num_tokens, chunks[index].stop))
        chunks_by_row = [chunks[index] for index in order]
        host_inputs = self._token_inputs(chunks_by_row)
        device_inputs = self._to_device(host_inputs)
        ids, indices, slots = device_inputs[:3]
        metadata = AttentionMetadata(self.pool, slots, self._build_tiles(chunks_by_row), states=self.states)
        logit_rows, num_rows = list_logit_rows(chunks_by_row)
        decoding = [chunk.request for chunk in chunks] if len(logit_rows) == num_rows == len(chunks) else []
        if decoding:
            for tile in metadata.tiles:
                tile.query_positions = indices[tile.start : tile.stop].unsqueeze(1)
        return InputBatch(
            chunk_order=order,
            decoding_requests=decoding,
            starts=[chunk.start for chunk in chunks_by_row],
            host_inputs=host_inputs,
            device_inputs=device_inputs,
            input_ids=ids,
            positions=device_inputs[3:] if self.has_grid_positions else indices,
            attn_metadata=metadata,
            logit_rows=self._to_device(logit_rows),
        )

    def _advance_batch(self, chunks: Sequence[ScheduledChunk]) -> "InputBatch | None":
        """Return the last batch advanced by one token if the same requests keep decoding, as in most steps."""
        last = self._last_batch
        if last is None or [chunk.request for chunk in chunks] != last.decoding_requests:
            return None
        chunks_by_row = [chunks[index] for index in last.chunk_order]
        starts = [chunk.start for chunk in chunks_by_row]
        was_advanced = starts == [start + 1 for start in last.starts]
        if not was_advanced or not all(chunk.request.block_table_len for chunk in chunks_by_row):
            return None
        size = self.block_size
        needs_new_block = 0 in [start % size for start in starts]
        last.starts = starts
        last.host_inputs[0] = [chunk.request.token_ids[chunk.start] for chunk in chunks_by_row]
        last.host_inputs[1:] += 1
        if needs_new_block:
            blocks = [self._block_table(chunk)[chunk.start // size] for chunk in chunks_by_row]
            last.host_inputs[2] = [block * size + start % size for block, start in zip(blocks, starts)]
        if self.has_device_memory:
            last.device_inputs.copy_(torch.from_numpy(last.host_inputs))
        for tile in last.attn_metadata.tiles:
            if not tile.advance(starts[tile.stop - 1] + 1, self.pool, self.kv_buffer_bytes):
                return None
            if needs_new_block and not tile.kv_buffers:
                tile.block_table = self._stack_block_tables(chunks_by_row[tile.start : tile.stop])
        return last

    def _token_inputs(self, chunks: Sequence[ScheduledChunk]) -> np.ndarray:
        """Return token id, index in its sequence and slot of every new token, and its three positions on a grid."""
        ids: list[int] = []
        indices: list[int] = []
        slots: list[int] = []
        size = self.block_size
        for chunk in chunks:
            request = chunk.request
            for index in range(chunk.start, chunk.stop):
                ids.append(request.token_ids[index])
                indices.append(index)
                slots.append(request.blocks[index // size].block_id * size + index % size)
        inputs = np.array((ids, indices, slots))
        if not self.has_grid_positions:
            return inputs
        positions = [chunk.request.get_positions(chunk.start, chunk.stop) for chunk in chunks]
        return np.concatenate([inputs, np.concatenate(positions, axis=1)])

    def _build_tiles(self, chunks: Sequence[ScheduledChunk]) -> list[AttentionTile]:
        tiles: list[AttentionTile] = []
        row, first = 0, 0
        for index, chunk in enumerate(chunks):
            if not self._can_share_tile(chunks[first], chunk):
                tiles.append(self._build_tile(chunks[first:index], row))
                row, first = tiles[-1].stop, index
        tiles.append(self._build_tile(chunks[first:], row))
        return tiles

    def _can_share_tile(self, small: ScheduledChunk, large: ScheduledChunk) -> bool:
        fewer_tokens, more_tokens = small.num_tokens, large.num_tokens
        fewer_blocks, more_blocks = sorted(-(-chunk.stop // self.block_size) for chunk in (small, large))
        return (
            (fewer_tokens > 1 or more_tokens == 1)
            and more_tokens <= 2 * fewer_tokens
            and more_blocks <= max(2 * fewer_blocks, MIN_TILE_BLOCKS)
        )

    def _build_tile(self, chunks: Sequence[ScheduledChunk], start: int) -> AttentionTile:
        counts = [chunk.num_tokens for chunk in chunks]
        queries = max(counts)
        offsets = np.arange(queries)
        lengths = np.array(counts)[:, None]
        padded_offsets = np.minimum(offsets, lengths - 1)  # padding repeats the last token of its sequence
        positions = np.array([chunk.start for chunk in chunks])[:, None] + padded_offsets
        pad_index = unpad_index = device_lengths = state_slots = None
        if self.states is not None:
            state_slots = self._to_device([chunk.request.state_slot for chunk in chunks])
        if min(counts) < queries:
            device_lengths = self._to_device(counts)
            row_starts = np.concatenate(([0], np.cumsum(counts)[:-1]))[:, None]
            pad_index = self._to_device((row_starts + padded_offsets).ravel())
            unpad_index = self._to_device(np.flatnonzero((offsets < lengths).ravel()))
        return AttentionTile(
            start,
            start + sum(counts),
            len(chunks),
            queries,
            self._stack_block_tables(chunks),
            self._to_device(positions),
            pad_index,
            unpad_index,
            device_lengths,
            state_slots,
        )

    def _stack_block_tables(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Return the block tables of the chunks' requests side by side, padded with block 0."""
        num_blocks = -(-max(chunk.stop for chunk in chunks) // self.block_size)
        stacked = np.zeros((len(chunks), num_blocks), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            block_table = self._block_table(chunk)[:num_blocks]
            stacked[row, : len(block_table)] = block_table
        return self._to_device(stacked.ravel())

    def _block_table(self, chunk: ScheduledChunk) -> np.ndarray:
        """Return the block ids of a request; the array is extended as the request gets blocks."""
        request = chunk.request
        num_blocks = len(request.blocks)
        if request.block_table is None or num_blocks > len(request.block_table):
            grown = np.zeros(max(16, 2 * num_blocks), dtype=np.int64)
            if request.block_table is not None:
                grown[: len(request.block_table)] = request.block_table
            request.block_table = grown
        if request.block_table_len < num_blocks:
            new_blocks = request.blocks[request.block_table_len :]
            request.block_table[request.block_table_len : num_blocks] = [block.block_id for block in new_blocks]
            request.block_table_len = num_blocks
        return request.block_table[:num_blocks]

    def _run_fixed(self, chunks: Sequence[ScheduledChunk], num_rows: int) -> tuple[list[ScheduledChunk], Tensor]:
        """Run in batch-invariant mode, with `num_rows` rows of which some are padding."""
        inputs = self._token_inputs(chunks)
        max_keys = max(chunk.stop for chunk in chunks)
        padded_keys = -(-max_keys // INVARIANT_KEY_MULTIPLE) * INVARIANT_KEY_MULTIPLE
        num_blocks = -(-padded_keys // self.block_size)
        row_tables = np.zeros((num_rows, num_blocks), dtype=np.int64)
        row = 0
        for chunk in chunks:
            block_table = self._block_table(chunk)[:num_blocks]
            row_tables[row : row + chunk.num_tokens, : len(block_table)] = block_table
            row += chunk.num_tokens
        padded_inputs = self._to_device(np.pad(inputs, ((0, 0), (0, num_rows - inputs.shape[1]))))
        ids, indices, slots = padded_inputs[:3]
        positions = padded_inputs[3:] if self.has_grid_positions else indices
        block_table = self._to_device(row_tables.ravel())
        tile = AttentionTile(0, num_rows, num_rows, 1, block_table, indices.unsqueeze(1))
        metadata = AttentionMetadata(self.pool, slots, [tile])
        all_rows = self._to_device(range(num_rows))
        logits = self._forward(ids, positions, metadata, all_rows, self._gather_images(chunks))
        logit_rows, _ = list_logit_rows(chunks)
        return list(chunks), logits.index_select(0, self._to_device(logit_rows))

    def _to_device(self, values: Sequence[int] | np.ndarray | range) -> Tensor:
        if not isinstance(values, np.ndarray):
            values = np.array(values, dtype=np.int64)
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)


def list_logit_rows(chunks: Sequence[ScheduledChunk]) -> tuple[list[int], int]:
    """Return the rows that need logits, and the number of all rows."""
    logit_rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        logit_rows += range(end - count_logit_rows(chunk), end)
    return logit_rows, end


def count_logit_rows(chunk: ScheduledChunk) -> int:
    """Return how many of a chunk's last rows need logits."""
    if chunk.request.needs_prompt_logprobs:
        return chunk.stop - min(max(chunk.start, chunk.request.num_cacheable_tokens), chunk.stop)
    return 1 if chunk.samples_next else 0
