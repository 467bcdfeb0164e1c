"""What attention computes in one step: which queries read which keys, as a list of work items for the GPU.

The rows of a step are the new tokens of its sequences. A *work item* is a range of keys of one sequence, read for a few
adjacent rows. A sequence that decodes has one row; sequences whose block tables begin with the same blocks, as the
attempts of a group behind their prompt or the branches of an agent behind its history, are put side by side, and their
common blocks become items of all of them: they are read once. The rest of each sequence is an item of its own. A chunk
of a prompt has many rows, which share its items as well.

Long ranges are cut into pieces, so that the GPU has enough of them. Each piece gives a *partial* result for each of its
rows, and these are merged afterwards; a row with only one piece needs no merge. Items are of three sizes, since a
product with 16 queries costs a fraction of one with 128: small ones have one row, large ones several, and chunk items
have the rows of a chunk in a step that computes many tokens; in other steps chunks are large items.

A plan stays valid while the same sequences decode. It covers SPARE_KEYS more keys than there are, and the kernels read
only keys up to the position of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

HEADER_INTS = 8
ITEM_INTS = 6
SPARE_KEYS = 64  # that a sequence may grow by before a new plan is needed
MIN_SAVED_KEYS = 256  # common blocks are read once only if that saves reading this many keys
KEY_TILE = 64  # pieces are multiples of this
MIN_PIECE_KEYS = 256  # shorter ones cost more to merge than they gain
MIN_SINGLE_PIECE_KEYS = 128  # where there are fewer items than programs


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the plan has to know about the GPU and the model."""

    num_programs: int  # that run at the same time
    kv_heads: int
    rows_per_item: int  # of large items, at most
    block_size: int
    share: bool = True  # whether common blocks are read once
    rows_per_chunk_item: int = 0  # at most; 0 if chunks are large items


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan of one step. `data` is what the kernels read; see `_pack` for its layout."""

    data: np.ndarray
    num_other_items: int  # large and small ones
    num_chunk_items: int
    num_partials: int
    num_merged_rows: int  # rows from the first to the last that needs a merge
    shared_keys: int  # keys that are read once instead of once for each row, summed over the rows that share them
    table_starts: np.ndarray  # of each sequence: where its block table is in `data`
    key_limits: np.ndarray  # of each sequence: the keys that the plan covers


class _Items(NamedTuple):
    """Work items as columns: the first row, the number of rows, the sequence, and the range of keys."""

    row: np.ndarray
    num_rows: np.ndarray
    sequence: np.ndarray
    key_start: np.ndarray
    key_stop: np.ndarray

    @classmethod
    def from_rows(cls, rows: list[tuple[int, int, int, int, int]]) -> "_Items":
        """Return items that are listed one by one."""
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)

    def cut(self, piece_keys: int) -> "_Items":
        """Return the items cut into pieces of at most `piece_keys` keys."""
        counts = np.maximum(1, -(-(self.key_stop - self.key_start) // piece_keys))
        index = np.repeat(np.arange(len(counts)), counts)
        piece = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self.key_start[index] + piece * piece_keys
        stops = np.minimum(starts + piece_keys, self.key_stop[index])
        return _Items(self.row[index], self.num_rows[index], self.sequence[index], starts, stops)


def order_by_prefix(block_tables: Sequence[np.ndarray]) -> list[int]:
    """Return an order of sequences in which those with common first blocks are adjacent."""
    if len(block_tables) < 2:
        return list(range(len(block_tables)))
    tables = _stack_tables(block_tables).astype(">i4")  # in big-endian order bytes compare as numbers do
    return np.argsort(tables.view(f"V{tables.shape[1] * 4}").ravel(), kind="stable").tolist()


def build_plan(
    block_tables: Sequence[np.ndarray], starts: Sequence[int], stops: Sequence[int], num_rows: int, shape: KernelShape
) -> AttentionPlan:
    """Plan a step in which sequences compute tokens [start, stop), with the rows in the order of the sequences.

    Sequences that decode come first, in the order of `order_by_prefix`. `num_rows` counts the rows with padding.
    """
    first, last = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
    counts = last - first
    num_decoding = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
    rows = np.cumsum(counts) - counts
    limits = np.where(counts == 1, last + SPARE_KEYS, last)
    runs = find_shared_runs(block_tables[:num_decoding], shape) if shape.share else []
    own_start = np.zeros(num_decoding, dtype=np.int64)
    for start, stop, _, depth in runs:
        own_start[start:stop] = np.maximum(own_start[start:stop], depth * shape.block_size)
    shared_items = _list_shared_items(runs, shape)
    chunk_items = _list_chunk_items(rows, first, last, num_decoding, shape.rows_per_chunk_item or shape.rows_per_item)
    large, chunks = (shared_items, chunk_items) if shape.rows_per_chunk_item else (shared_items + chunk_items, [])
    decoding = np.arange(num_decoding)
    small = _Items(decoding, np.ones_like(decoding), decoding, own_start, limits[:num_decoding])
    items = [
        items.cut(_choose_piece_keys(items, num_pieces, shape))
        for items, num_pieces in (
            (_Items.from_rows(large), 2 * shape.num_programs),
            (small, 2 * shape.num_programs),
            (_Items.from_rows(chunks), max(1, shape.num_programs // 2)),  # they cost more to merge
        )
    ]
    tables = [table[: -(-int(limit) // shape.block_size)] for table, limit in zip(block_tables, limits)]
    shared = sum((stop - start - 1) * (deep - shallow) * shape.block_size for start, stop, shallow, deep in runs)
    return _pack(items, tables, limits, num_rows, shared, shape.block_size)


def find_shared_runs(block_tables: Sequence[np.ndarray], shape: KernelShape) -> list[tuple[int, int, int, int]]:
    """Return the runs of blocks that adjacent sequences share: (start, stop, first block, end block).

    Runs are nested like the tree of the sequences: a run continues the one that contains it.
    """
    count = len(block_tables)
    if count < 2:
        return []
    tables = _stack_tables(block_tables)
    differs = tables[1:] != tables[:-1]
    common = np.where(differs.any(1), differs.argmax(1), tables.shape[1])  # blocks in common with the next sequence
    runs: list[tuple[int, int, int, int]] = []
    pending = [(0, count, 0)]
    while pending:
        start, stop, depth = pending.pop()
        inner = common[start : stop - 1]
        shared = int(inner.min())
        if (stop - start - 1) * (shared - depth) * shape.block_size >= MIN_SAVED_KEYS:
            runs.append((start, stop, depth, shared))
            depth = shared
        bounds = [start, *(start + 1 + np.flatnonzero(inner == shared)).tolist(), stop]
        pending += [(low, high, depth) for low, high in pairwise(bounds) if high - low > 1]
    return runs


def _stack_tables(block_tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tables as rows of one array, padded with numbers that no two rows share."""
    width = max(len(table) for table in block_tables)
    stacked = np.repeat(-1 - np.arange(len(block_tables), dtype=np.int32)[:, None], width, axis=1)
    for row, table in enumerate(block_tables):
        stacked[row, : len(table)] = table
    return stacked


def _list_shared_items(
    runs: list[tuple[int, int, int, int]], shape: KernelShape
) -> list[tuple[int, int, int, int, int]]:
    """Return the items of shared runs, cut into groups of rows."""
    size, step = shape.block_size, shape.rows_per_item
    return [
        (row, min(step, stop - row), start, shallow * size, deep * size)
        for start, stop, shallow, deep in runs
        for row in range(start, stop, step)
    ]


def _list_chunk_items(
    rows: np.ndarray, first: np.ndarray, last: np.ndarray, num_decoding: int, step: int
) -> list[tuple[int, int, int, int, int]]:
    """Return the items of chunks, cut into groups of `step` rows; in a chunk, the last rows come first."""
    items: list[tuple[int, int, int, int, int]] = []
    for index in range(num_decoding, len(first)):
        num_rows, start, row = int(last[index] - first[index]), int(first[index]), int(rows[index])
        items += [
            (row + offset, min(step, num_rows - offset), index, 0, start + min(offset + step, num_rows))
            for offset in reversed(range(0, num_rows, step))
        ]
    return items


def _choose_piece_keys(items: _Items, num_pieces: int, shape: KernelShape) -> int:
    """Return the length of pieces of which there are about `num_pieces` over all key heads."""
    num_keys = int((items.key_stop - items.key_start).sum()) * shape.kv_heads
    wanted = num_keys // num_pieces
    has_many = len(items.row) * shape.kv_heads >= shape.num_programs
    return max(MIN_PIECE_KEYS if has_many else MIN_SINGLE_PIECE_KEYS, -(-wanted // KEY_TILE) * KEY_TILE)


def _pack(
    items_by_size: Sequence[_Items],
    tables: Sequence[np.ndarray],
    limits: np.ndarray,
    num_rows: int,
    shared_keys: int,
    block_size: int,
) -> AttentionPlan:
    """Return the plan as one array of int32, which the kernels read.

    It holds a header (number of large and of small items, and where the sections begin), the items (row, number of
    rows, start of the block table, range of keys, first partial or -1), for each row the range of its partials in the
    next section, the partials by row, and the block tables.
    """
    num_large, num_small, num_chunk_items = (len(items.row) for items in items_by_size)
    items = _Items(*(np.concatenate(columns) for columns in zip(*items_by_size)))
    item_of_pair = np.repeat(np.arange(len(items.row)), items.num_rows)
    offset = np.arange(len(item_of_pair)) - np.repeat(np.cumsum(items.num_rows) - items.num_rows, items.num_rows)
    row_of_pair = items.row[item_of_pair] + offset
    pieces_of_row = np.bincount(row_of_pair, minlength=num_rows)
    needs_merge = np.maximum.reduceat(pieces_of_row[row_of_pair], np.cumsum(items.num_rows) - items.num_rows) > 1
    partial_counts = np.where(needs_merge, items.num_rows, 0)
    first_partial = np.where(needs_merge, np.cumsum(partial_counts) - partial_counts, -1)
    merged_pairs = np.flatnonzero(needs_merge[item_of_pair])
    by_row = merged_pairs[np.argsort(row_of_pair[merged_pairs], kind="stable")]
    partials = first_partial[item_of_pair[by_row]] + offset[by_row]
    merged_counts = np.bincount(row_of_pair[merged_pairs], minlength=num_rows)

    rows_at = HEADER_INTS + ITEM_INTS * len(items.row)
    partials_at = rows_at + 2 * num_rows
    tables_at = partials_at + len(partials)
    capacities = -(-limits // block_size)
    table_starts = tables_at + np.cumsum(capacities) - capacities
    data = np.zeros(tables_at + int(capacities.sum()), dtype=np.int32)
    data[:4] = num_large, num_small, rows_at, partials_at
    columns = items.row, items.num_rows, table_starts[items.sequence], items.key_start, items.key_stop, first_partial
    data[HEADER_INTS:rows_at] = np.stack(columns, 1).ravel()
    merged_ends = np.cumsum(merged_counts)
    data[rows_at:partials_at] = np.stack((merged_ends - merged_counts, merged_ends), 1).ravel()
    data[partials_at:tables_at] = partials
    for start, table in zip(table_starts.tolist(), tables):
        data[start : start + len(table)] = table
    return AttentionPlan(
        data=data,
        num_other_items=num_large + num_small,
        num_chunk_items=num_chunk_items,
        num_partials=len(partials),
        num_merged_rows=int(row_of_pair[by_row].max(initial=-1)) + 1,
        shared_keys=shared_keys,
        table_starts=table_starts,
        key_limits=limits,
    )
