"""From scheduled chunks to logits: one flat forward.

Tokens of all chunks lie in one row, sorted so that those which can share a tile lie side by side. Two chunks share a
tile if neither their new tokens nor their blocks differ by more than a factor of two, so padding at most doubles the
work of the smallest, and the number of tiles grows only with the logarithm of the lengths.

In `batch_invariant` mode nothing may depend on the company a token is in. Every token, of a prompt or not, is a tile
row of its own, the number of rows is fixed, and keys are padded to a multiple of a fixed length: each operator then has
the same shapes in every step, and a row's result is the same bits wherever it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ModelUnsupported, RamifyError
from ramify.infer.cuda_graphs import CudaGraphRunner
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest
from ramify.infer.scheduler import ScheduledChunk
from ramify.model.cpu.decoder import ROWS_PER_CHUNK, CompiledDecoderOps
from ramify.model.fused_model import build_fused_model, build_hf_forward
from ramify.model.load import ATTENTION_NAME, LoadedModel
from ramify.model.logprob_check import (
    NUM_CHECK_TOKENS,
    build_check_ids,
    check_logprobs,
    compute_logprobs,
    compute_reference_logprobs,
    unsupported_error,
)
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool

MIN_TILE_BLOCKS = 8  # sequences shorter than this many blocks always share a tile
MAX_KV_BUFFER_BYTES = 512 << 20  # gathered keys and values that decoding requests may hold from step to step
INVARIANT_KEY_MULTIPLE = 512  # keys are padded to a multiple of this in batch-invariant mode


@dataclass(slots=True)
class InputBatch:
    """The tensors of one step."""

    chunk_order: list[int]  # of the chunks, by row
    decoding_requests: list[EngineRequest]  # those of the chunks, if each is one token and wants its logits
    starts: list[int]
    host_inputs: np.ndarray  # [3, rows]: ids, positions and slots
    device_inputs: Tensor  # the same where the model is; on a CPU the same memory
    input_ids: Tensor
    positions: Tensor
    attn_metadata: AttentionMetadata
    logit_rows: Tensor


class ModelRunner:
    """Owns the model's key-value memory and runs steps."""

    def __init__(
        self,
        model: LoadedModel,
        counters: EngineCounters,
        *,
        num_blocks: int,
        block_size: int,
        fused: bool = True,
        fixed_rows: int | None = None,
    ) -> None:
        self.model, self.counters = model, counters
        self.has_device_memory = model.device.type != "cpu"  # whether the model has memory of its own
        self.block_size = block_size
        self.fixed_rows = fixed_rows and -(-fixed_rows // ROWS_PER_CHUNK) * ROWS_PER_CHUNK
        shape = model.shape
        self.pool = KVPool(
            shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self.fused_model = build_fused_model(model.module) if fused else None
        self.forward = self.fused_model or build_hf_forward(model.module)
        operators = self.fused_model.ops if self.fused_model else None
        self.ops_description = operators.description if operators else "the model's own code"
        self.compiled_ops = operators if isinstance(operators, CompiledDecoderOps) else None
        self.kv_buffer_bytes = (
            0 if self.compiled_ops else MAX_KV_BUFFER_BYTES
        )  # compiled attention reads the pool itself
        self.cuda_graphs = (
            CudaGraphRunner(self.fused_model, self.pool) if self.fused_model and model.device.type == "cuda" else None
        )
        self._last_batch: InputBatch | None = None
        if self.fused_model is None:  # otherwise `fuse` has recognized the code of a known family
            self._check_model(min(NUM_CHECK_TOKENS, num_blocks * block_size, shape.max_positions))

    @torch.no_grad()
    def _check_model(self, num_tokens: int) -> None:
        """Raise ModelUnsupported unless a few tokens through the paged cache get the logprobs of the model itself."""
        module, ids = self.model.module, build_check_ids(self.model.module.config, num_tokens)
        place = torch.arange(num_tokens, device=self.model.device)
        blocks = torch.arange(-(-num_tokens // self.block_size), device=self.model.device)
        step = AttentionMetadata(
            self.pool, place, [AttentionTile(0, num_tokens, 1, num_tokens, blocks, place.unsqueeze(0))]
        )
        ids = ids.to(self.model.device)
        try:
            logits = self.forward(ids, place, step, place)
        except (RamifyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model that is put together in another way fails anywhere
            raise unsupported_error("engine", module, error) from error
        if step.last_layer < len(self.pool.layers) - 1:
            raise ModelUnsupported(
                f"{type(module).__name__} computes attention by itself, so it cannot read the paged cache"
            )
        if num_tokens > 1:
            expected, actual = (
                compute_reference_logprobs(module, ids, ATTENTION_NAME),
                compute_logprobs(logits[:-1], ids[1:]),
            )
            check_logprobs("engine", module, expected, actual)

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute the chunks. Returns them in the order of their rows, and the logits of the rows asked for.

        A chunk that asks for prompt logprobs has logits for every token, one that samples for its last, others none.
        """
        if self.fixed_rows is not None:
            return self._run_fixed(chunks, self.fixed_rows)
        if (
            self.cuda_graphs
            and _is_decode_only(chunks)
            and self.cuda_graphs.can_replay(len(chunks), max(chunk.stop for chunk in chunks))
        ):
            return list(chunks), self._replay_graph(self.cuda_graphs, chunks)
        batch = self._last_batch = self._advance_batch(chunks) or self._prepare_inputs(chunks)
        ordered = [chunks[place] for place in batch.chunk_order]
        return ordered, self.forward(batch.input_ids, batch.positions, batch.attn_metadata, batch.logit_rows)

    def _replay_graph(self, graphs: CudaGraphRunner, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """The logits of a step in which each request brings one token, by a recorded graph."""
        self.counters.replayed_steps += 1
        size = self.block_size
        starts = np.array([chunk.start for chunk in chunks])
        ids = np.array([chunk.request.token_ids[chunk.start] for chunk in chunks])
        tables = [self._block_table(chunk) for chunk in chunks]
        blocks = np.array([table[chunk.start // size] for table, chunk in zip(tables, chunks)])
        return graphs.replay(ids, starts, blocks * size + starts % size, tables)

    def _prepare_inputs(self, chunks: Sequence[ScheduledChunk]) -> "InputBatch":
        order = sorted(range(len(chunks)), key=lambda place: (chunks[place].num_tokens, chunks[place].stop))
        ordered = [chunks[place] for place in order]
        host = np.array(self._token_inputs(ordered))
        given = self._to_device(host)
        ids, positions, slots = given
        step = AttentionMetadata(self.pool, slots, self._build_tiles(ordered))
        rows: list[int] = []
        end = 0
        for chunk in ordered:
            end += chunk.num_tokens
            rows += range(end - count_logit_rows(chunk), end)
        decoding = [chunk.request for chunk in chunks] if len(rows) == end == len(chunks) else []
        if decoding:
            for tile in step.tiles:
                tile.query_positions = positions[tile.start : tile.stop].unsqueeze(1)
        starts = [chunk.start for chunk in ordered]
        return InputBatch(order, decoding, starts, host, given, ids, positions, step, self._to_device(rows))

    def _advance_batch(self, chunks: Sequence[ScheduledChunk]) -> "InputBatch | None":
        """The last batch moved on by one token, if the same requests go on decoding. Most steps do."""
        last = self._last_batch
        if last is None or [chunk.request for chunk in chunks] != last.decoding_requests:
            return None
        ordered = [chunks[place] for place in last.chunk_order]
        starts = [chunk.start for chunk in ordered]
        if starts != [start + 1 for start in last.starts] or not all(
            chunk.request.block_table_len for chunk in ordered
        ):
            return None
        size = self.block_size
        crossed = 0 in [start % size for start in starts]
        last.starts = starts
        last.host_inputs[0] = [chunk.request.token_ids[chunk.start] for chunk in ordered]
        last.host_inputs[1:] += 1
        if crossed:
            blocks = [self._block_table(chunk)[chunk.start // size] for chunk in ordered]
            last.host_inputs[2] = [block * size + start % size for block, start in zip(blocks, starts)]
        if self.has_device_memory:
            last.device_inputs.copy_(torch.from_numpy(last.host_inputs))
        for tile in last.attn_metadata.tiles:
            if not tile.advance(starts[tile.stop - 1] + 1, self.pool, self.kv_buffer_bytes):
                return None
            if crossed and not tile.kv_buffers:
                tile.block_table = self._stack_block_tables(ordered[tile.start : tile.stop])
        return last

    def _token_inputs(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
        """Token id, position and slot of every new token."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.block_size
        for chunk in chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.stop):
                ids.append(request.token_ids[position])
                positions.append(position)
                slots.append(request.blocks[position // size].number * size + position % size)
        return ids, positions, slots

    def _build_tiles(self, chunks: Sequence[ScheduledChunk]) -> list[AttentionTile]:
        tiles: list[AttentionTile] = []
        row, first = 0, 0
        for index, chunk in enumerate(chunks):
            nearest = chunks[first]
            if not self._can_share_tile(nearest, chunk):
                tiles.append(self._build_tile(chunks[first:index], row))
                row, first = tiles[-1].stop, index
        tiles.append(self._build_tile(chunks[first:], row))
        return tiles

    def _can_share_tile(self, small: ScheduledChunk, large: ScheduledChunk) -> bool:
        new, more = small.num_tokens, large.num_tokens
        size = self.block_size
        few, many = sorted((-(-small.stop // size), -(-large.stop // size)))
        return (new > 1 or more == 1) and more <= 2 * new and many <= max(2 * few, MIN_TILE_BLOCKS)

    def _build_tile(self, chunks: Sequence[ScheduledChunk], start: int) -> AttentionTile:
        counts = [chunk.num_tokens for chunk in chunks]
        queries = max(counts)
        offsets = np.arange(queries)
        lengths = np.array(counts)[:, None]
        within = np.minimum(offsets, lengths - 1)  # padding repeats the last token of its sequence
        positions = np.array([chunk.start for chunk in chunks])[:, None] + within
        spread = pack = None
        if min(counts) < queries:
            begins = np.concatenate(([0], np.cumsum(counts)[:-1]))[:, None]
            spread = self._to_device((begins + within).ravel())
            pack = self._to_device(np.flatnonzero((offsets < lengths).ravel()))
        stop = start + sum(counts)
        return AttentionTile(
            start,
            stop,
            len(chunks),
            queries,
            self._stack_block_tables(chunks),
            self._to_device(positions),
            spread,
            pack,
        )

    def _stack_block_tables(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """The block numbers of the chunks' requests side by side, padded with block 0."""
        blocks = -(-max(chunk.stop for chunk in chunks) // self.block_size)
        table = np.zeros((len(chunks), blocks), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            known = self._block_table(chunk)[:blocks]
            table[row, : len(known)] = known
        return self._to_device(table.ravel())

    def _block_table(self, chunk: ScheduledChunk) -> np.ndarray:
        """The block numbers of a request, written down once as they come."""
        request = chunk.request
        have = len(request.blocks)
        if request.block_table is None or have > len(request.block_table):
            grown = np.zeros(max(16, 2 * have), dtype=np.int64)
            if request.block_table is not None:
                grown[: len(request.block_table)] = request.block_table
            request.block_table = grown
        if request.block_table_len < have:
            request.block_table[request.block_table_len : have] = [
                block.number for block in request.blocks[request.block_table_len :]
            ]
            request.block_table_len = have
        return request.block_table[:have]

    def _run_fixed(self, chunks: Sequence[ScheduledChunk], num_rows: int) -> tuple[list[ScheduledChunk], Tensor]:
        ids, positions, slots = self._token_inputs(chunks)
        used, size = len(ids), self.block_size
        longest = max(chunk.stop for chunk in chunks)
        blocks = -(-(-(-longest // INVARIANT_KEY_MULTIPLE) * INVARIANT_KEY_MULTIPLE) // size)
        table = np.zeros((num_rows, blocks), dtype=np.int64)
        row = 0
        rows: list[int] = []
        for chunk in chunks:
            known = self._block_table(chunk)[:blocks]
            end = row + chunk.num_tokens
            table[row:end, : len(known)] = known
            rows += range(end - count_logit_rows(chunk), end)
            row = end
        padding = [0] * (num_rows - used)
        where = self._to_device([*positions, *padding])
        tile = AttentionTile(0, num_rows, num_rows, 1, self._to_device(table.ravel()), where.unsqueeze(1))
        step = AttentionMetadata(self.pool, self._to_device([*slots, *padding]), [tile])
        logits = self.forward(self._to_device([*ids, *padding]), where, step, self._to_device(range(num_rows)))
        return list(chunks), logits.index_select(0, self._to_device(rows))

    def _to_device(self, values: Sequence[int] | np.ndarray | range) -> Tensor:
        if not isinstance(values, np.ndarray):
            values = np.array(values, dtype=np.int64)
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)


def _is_decode_only(chunks: Sequence[ScheduledChunk]) -> bool:
    """Whether each chunk is one token, and its logits are wanted."""
    return all(chunk.num_tokens == count_logit_rows(chunk) == 1 for chunk in chunks)


def count_logit_rows(chunk: ScheduledChunk) -> int:
    """How many of a chunk's last rows need logits."""
    if needs_prompt_logprobs(chunk):
        return chunk.num_tokens
    return 1 if chunk.samples_next else 0


def needs_prompt_logprobs(chunk: ScheduledChunk) -> bool:
    """Whether prompt logprobs come from this chunk."""
    request = chunk.request
    return request.sampling_params.prompt_logprobs and len(request.prompt_logprobs) < len(request.prompt_token_ids)
