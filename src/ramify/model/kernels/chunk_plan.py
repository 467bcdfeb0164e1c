"""The sizes with which the gated delta rule is computed in chunks, and the chunks of an engine's step.

The engine, the trainer and the estimates of memory read the same sizes. Importable without torch.
"""

from collections.abc import Sequence

import numpy as np

CHUNK_SIZE = 64  # tokens of a path or a sequence that are computed together
MIN_CHUNK_ROWS = CHUNK_SIZE // 2  # in an engine on CUDA, a sequence with fewer rows in a step is computed row by row
MIN_WIDTH = 64  # to which heads are padded: with 16, code of Triton 3.6 accesses memory out of bounds on an H200


def round_up_width(width: int) -> int:
    """Return the width to which the heads of queries, keys or values are padded by the kernels for CUDA."""
    return max(MIN_WIDTH, 1 << (width - 1).bit_length())


def plan_chunks(
    starts: Sequence[int], stops: Sequence[int], state_slots: Sequence[int], padded_rows: int = 0
) -> np.ndarray:
    """Return the chunks and tracks of a step as `StepSequences` has them, [2, chunks, 3].

    `starts` and `stops` are the bounds of its sequences. If any is long enough, the tables are padded to the number of
    chunks that `padded_rows` rows can have: a CUDA graph is captured for a fixed number.
    """
    chunks: list[tuple[int, int, int]] = []
    tracks: list[tuple[int, int, int]] = []
    for start, stop, slot in zip(starts, stops, state_slots):
        if stop - start >= MIN_CHUNK_ROWS:
            first_chunk, last_row = len(chunks), start + (stop - start - 1) // CHUNK_SIZE * CHUNK_SIZE
            chunks += [(row, row + CHUNK_SIZE, -1) for row in range(start, last_row, CHUNK_SIZE)]
            chunks.append((last_row, stop, slot))
            tracks.append((first_chunk, len(chunks), slot))
    num_chunks = max(len(chunks), padded_rows // MIN_CHUNK_ROWS) if chunks else 0
    tables = np.tile(np.array([0, 0, -1], dtype=np.int32), (2, num_chunks, 1))
    if chunks:
        tables[0, : len(chunks)], tables[1, : len(tracks)] = chunks, tracks
    return tables
