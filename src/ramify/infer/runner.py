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
from ramify.infer.graphs import Graphs
from ramify.infer.metrics import Counters
from ramify.infer.request import Request
from ramify.infer.scheduler import Chunk
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
from ramify.model.operators import ROWS_PER_CHUNK, CompiledDecoderOps
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool

FEWEST_BLOCKS = 8  # sequences shorter than this many blocks always share a tile
HOLD_BYTES = 512 << 20  # gathered keys and values that decoding requests may hold from step to step
INVARIANT_KEYS = 512  # keys are padded to a multiple of this in batch-invariant mode


@dataclass(slots=True)
class Batch:
    """The tensors of one step."""

    order: list[int]  # of the chunks, by row
    decoding: list[Request]  # those of the chunks, if each is one token and wants its logits
    starts: list[int]
    host: np.ndarray  # [3, rows]: ids, positions and slots
    given: Tensor  # the same where the model is; on a CPU the same memory
    ids: Tensor
    positions: Tensor
    step: AttentionMetadata
    rows: Tensor


class Runner:
    """Owns the model's key-value memory and runs steps."""

    def __init__(
        self,
        model: LoadedModel,
        counters: Counters,
        *,
        blocks: int,
        block_size: int,
        fused: bool = True,
        fixed_rows: int | None = None,
    ) -> None:
        self.model, self.counters = model, counters
        self.apart = model.device.type != "cpu"  # whether the model has memory of its own
        self.block_size = block_size
        self.fixed_rows = fixed_rows and -(-fixed_rows // ROWS_PER_CHUNK) * ROWS_PER_CHUNK
        shape = model.shape
        self.pool = KVPool(
            shape.num_layers, blocks, block_size, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self.fused = build_fused_model(model.module) if fused else None
        self.forward = self.fused or build_hf_forward(model.module)
        operators = self.fused.ops if self.fused else None
        self.operators = operators.description if operators else "the model's own code"
        self.compiled = operators if isinstance(operators, CompiledDecoderOps) else None
        self.hold = 0 if self.compiled else HOLD_BYTES  # compiled attention reads the pool itself
        self.graphs = Graphs(self.fused, self.pool) if self.fused and model.device.type == "cuda" else None
        self._last: Batch | None = None
        if self.fused is None:  # otherwise `fuse` has recognized the code of a known family
            self._check_model(min(NUM_CHECK_TOKENS, blocks * block_size, shape.max_positions))

    @torch.no_grad()
    def _check_model(self, count: int) -> None:
        """Raise ModelUnsupported unless a few tokens through the paged cache get the logprobs of the model itself."""
        module, ids = self.model.module, build_check_ids(self.model.module.config, count)
        place = torch.arange(count, device=self.model.device)
        blocks = torch.arange(-(-count // self.block_size), device=self.model.device)
        step = AttentionMetadata(self.pool, place, [AttentionTile(0, count, 1, count, blocks, place.unsqueeze(0))])
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
        if count > 1:
            expected, actual = (
                compute_reference_logprobs(module, ids, ATTENTION_NAME),
                compute_logprobs(logits[:-1], ids[1:]),
            )
            check_logprobs("engine", module, expected, actual)

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Tensor]:
        """Compute the chunks. Returns them in the order of their rows, and the logits of the rows asked for.

        A chunk that asks for prompt logprobs has logits for every token, one that samples for its last, others none.
        """
        if self.fixed_rows is not None:
            return self._run_fixed(chunks, self.fixed_rows)
        if self.graphs and _decoding(chunks) and self.graphs.fits(len(chunks), max(chunk.stop for chunk in chunks)):
            return list(chunks), self._replay(self.graphs, chunks)
        batch = self._last = self._next(chunks) or self._batch(chunks)
        ordered = [chunks[place] for place in batch.order]
        return ordered, self.forward(batch.ids, batch.positions, batch.step, batch.rows)

    def _replay(self, graphs: Graphs, chunks: Sequence[Chunk]) -> Tensor:
        """The logits of a step in which each request brings one token, by a recorded graph."""
        self.counters.replayed_steps += 1
        size = self.block_size
        starts = np.array([chunk.start for chunk in chunks])
        ids = np.array([chunk.request.tokens[chunk.start] for chunk in chunks])
        tables = [self._table(chunk) for chunk in chunks]
        blocks = np.array([table[chunk.start // size] for table, chunk in zip(tables, chunks)])
        return graphs.run(ids, starts, blocks * size + starts % size, tables)

    def _batch(self, chunks: Sequence[Chunk]) -> "Batch":
        order = sorted(range(len(chunks)), key=lambda place: (chunks[place].new, chunks[place].stop))
        ordered = [chunks[place] for place in order]
        host = np.array(self._rows(ordered))
        given = self._put(host)
        ids, positions, slots = given
        step = AttentionMetadata(self.pool, slots, self._tiles(ordered))
        rows: list[int] = []
        end = 0
        for chunk in ordered:
            end += chunk.new
            rows += range(end - wanted(chunk), end)
        decoding = [chunk.request for chunk in chunks] if len(rows) == end == len(chunks) else []
        if decoding:
            for tile in step.tiles:
                tile.query_positions = positions[tile.start : tile.stop].unsqueeze(1)
        starts = [chunk.start for chunk in ordered]
        return Batch(order, decoding, starts, host, given, ids, positions, step, self._put(rows))

    def _next(self, chunks: Sequence[Chunk]) -> "Batch | None":
        """The last batch moved on by one token, if the same requests go on decoding. Most steps do."""
        last = self._last
        if last is None or [chunk.request for chunk in chunks] != last.decoding:
            return None
        ordered = [chunks[place] for place in last.order]
        starts = [chunk.start for chunk in ordered]
        if starts != [start + 1 for start in last.starts] or not all(chunk.request.tabled for chunk in ordered):
            return None
        size = self.block_size
        crossed = 0 in [start % size for start in starts]
        last.starts = starts
        last.host[0] = [chunk.request.tokens[chunk.start] for chunk in ordered]
        last.host[1:] += 1
        if crossed:
            blocks = [self._table(chunk)[chunk.start // size] for chunk in ordered]
            last.host[2] = [block * size + start % size for block, start in zip(blocks, starts)]
        if self.apart:
            last.given.copy_(torch.from_numpy(last.host))
        for tile in last.step.tiles:
            if not tile.advance(starts[tile.stop - 1] + 1, self.pool, self.hold):
                return None
            if crossed and not tile.kv_buffers:
                tile.block_table = self._blocks(ordered[tile.start : tile.stop])
        return last

    def _rows(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[int]]:
        """Token id, position and slot of every new token."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.block_size
        for chunk in chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.stop):
                ids.append(request.tokens[position])
                positions.append(position)
                slots.append(request.blocks[position // size].number * size + position % size)
        return ids, positions, slots

    def _tiles(self, chunks: Sequence[Chunk]) -> list[AttentionTile]:
        tiles: list[AttentionTile] = []
        row, first = 0, 0
        for index, chunk in enumerate(chunks):
            nearest = chunks[first]
            if not self._alike(nearest, chunk):
                tiles.append(self._tile(chunks[first:index], row))
                row, first = tiles[-1].stop, index
        tiles.append(self._tile(chunks[first:], row))
        return tiles

    def _alike(self, small: Chunk, large: Chunk) -> bool:
        new, more = small.new, large.new
        size = self.block_size
        few, many = sorted((-(-small.stop // size), -(-large.stop // size)))
        return (new > 1 or more == 1) and more <= 2 * new and many <= max(2 * few, FEWEST_BLOCKS)

    def _tile(self, chunks: Sequence[Chunk], start: int) -> AttentionTile:
        counts = [chunk.new for chunk in chunks]
        queries = max(counts)
        offsets = np.arange(queries)
        lengths = np.array(counts)[:, None]
        within = np.minimum(offsets, lengths - 1)  # padding repeats the last token of its sequence
        positions = np.array([chunk.start for chunk in chunks])[:, None] + within
        spread = pack = None
        if min(counts) < queries:
            begins = np.concatenate(([0], np.cumsum(counts)[:-1]))[:, None]
            spread = self._put((begins + within).ravel())
            pack = self._put(np.flatnonzero((offsets < lengths).ravel()))
        stop = start + sum(counts)
        return AttentionTile(
            start, stop, len(chunks), queries, self._blocks(chunks), self._put(positions), spread, pack
        )

    def _blocks(self, chunks: Sequence[Chunk]) -> Tensor:
        """The block numbers of the chunks' requests side by side, padded with block 0."""
        blocks = -(-max(chunk.stop for chunk in chunks) // self.block_size)
        table = np.zeros((len(chunks), blocks), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            known = self._table(chunk)[:blocks]
            table[row, : len(known)] = known
        return self._put(table.ravel())

    def _table(self, chunk: Chunk) -> np.ndarray:
        """The block numbers of a request, written down once as they come."""
        request = chunk.request
        have = len(request.blocks)
        if request.table is None or have > len(request.table):
            grown = np.zeros(max(16, 2 * have), dtype=np.int64)
            if request.table is not None:
                grown[: len(request.table)] = request.table
            request.table = grown
        if request.tabled < have:
            request.table[request.tabled : have] = [block.number for block in request.blocks[request.tabled :]]
            request.tabled = have
        return request.table[:have]

    def _run_fixed(self, chunks: Sequence[Chunk], count: int) -> tuple[list[Chunk], Tensor]:
        ids, positions, slots = self._rows(chunks)
        used, size = len(ids), self.block_size
        longest = max(chunk.stop for chunk in chunks)
        blocks = -(-(-(-longest // INVARIANT_KEYS) * INVARIANT_KEYS) // size)
        table = np.zeros((count, blocks), dtype=np.int64)
        row = 0
        rows: list[int] = []
        for chunk in chunks:
            known = self._table(chunk)[:blocks]
            end = row + chunk.new
            table[row:end, : len(known)] = known
            rows += range(end - wanted(chunk), end)
            row = end
        padding = [0] * (count - used)
        where = self._put([*positions, *padding])
        tile = AttentionTile(0, count, count, 1, self._put(table.ravel()), where.unsqueeze(1))
        step = AttentionMetadata(self.pool, self._put([*slots, *padding]), [tile])
        logits = self.forward(self._put([*ids, *padding]), where, step, self._put(range(count)))
        return list(chunks), logits.index_select(0, self._put(rows))

    def _put(self, values: Sequence[int] | np.ndarray | range) -> Tensor:
        if not isinstance(values, np.ndarray):
            values = np.array(values, dtype=np.int64)
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)


def _decoding(chunks: Sequence[Chunk]) -> bool:
    """Whether each chunk is one token, and its logits are wanted."""
    return all(chunk.new == wanted(chunk) == 1 for chunk in chunks)


def wanted(chunk: Chunk) -> int:
    """How many of a chunk's last rows need logits."""
    if scored(chunk):
        return chunk.new
    return 1 if chunk.last else 0


def scored(chunk: Chunk) -> bool:
    """Whether prompt logprobs come from this chunk."""
    request = chunk.request
    return request.sampling.prompt_logprobs and len(request.prompt_logprobs) < len(request.prompt)
