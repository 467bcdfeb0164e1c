"""Decode steps as CUDA graphs: recorded once for each shape, then replayed by a single call.

A decode step is hundreds of kernels of a few microseconds each, and starting them one by one from Python takes several
times as long as they run. Shapes are rounded up so that few graphs are needed: rows to a power of two, blocks of a row
likewise. A row that is only padding writes to block 0, which belongs to nobody, and its logits are cut off. Weights are
copied into place, so a graph outlives an update.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.model.fused_model import FusedModel
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool

FEWEST_KEYS = 128  # a row has room for this many
MOST_KEYS = 1 << 18  # of all rows together; beyond it padding costs more than launching does
WARM_UPS = 2  # runs before a recording, in which libraries choose their kernels and take their memory


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    host: np.ndarray  # pinned, [3 + blocks, rows]: ids, positions, slots, then the block tables
    staging: Tensor  # the same memory, as torch sees it
    given: Tensor  # its copy on the device
    every: Tensor  # the numbers of all rows
    logits: Tensor


class Graphs:
    """The recorded decode steps of one model."""

    def __init__(self, forward: FusedModel, pool: KVPool) -> None:
        self._forward, self._pool = forward, pool
        self._device = pool.layers[0].device
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def fits(self, rows: int, longest: int) -> bool:
        """Whether a step of so many rows, the longest with so many keys, is to be replayed."""
        rows, blocks = self._shape(rows, longest)
        return rows * blocks * self._pool.block_size <= MOST_KEYS

    def run(self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, tables: list[np.ndarray]) -> Tensor:
        """The logits of one token of each sequence, valid until the next call. Tables hold a sequence's blocks."""
        rows, blocks = self._shape(len(ids), int(positions.max()) + 1)
        step = self._recorded.get((rows, blocks)) or self._record(rows, blocks)
        step.host[:] = 0
        step.host[:3, : len(ids)] = ids, positions, slots
        table = step.host[3:].reshape(rows, blocks)
        for row, known in enumerate(tables):
            table[row, : len(known)] = known[:blocks]
        step.given.copy_(step.staging, non_blocking=True)
        step.graph.replay()
        return step.logits[: len(ids)]

    def _shape(self, rows: int, longest: int) -> tuple[int, int]:
        return _power(rows), _power(-(-max(longest, FEWEST_KEYS) // self._pool.block_size))

    def _record(self, rows: int, blocks: int) -> Recorded:
        staging = torch.zeros(3 + blocks, rows, dtype=torch.int64).pin_memory()
        given = staging.to(self._device)
        every = torch.arange(rows, device=self._device)

        def forward() -> Tensor:
            tile = AttentionTile(0, rows, rows, 1, given[3:].view(-1), given[1].unsqueeze(1))  # new: it keeps its masks
            return self._forward(given[0], given[1], AttentionMetadata(self._pool, given[2], [tile]), every)

        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = forward()
        recorded = Recorded(graph, staging.numpy(), staging, given, every, logits)
        self._recorded[rows, blocks] = recorded
        return recorded


def _power(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()
