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

MIN_KEYS_PER_ROW = 128  # a row has room for this many
MAX_TOTAL_KEYS = 1 << 18  # of all rows together; beyond it padding costs more than launching does
WARMUP_RUNS = 2  # runs before a recording, in which libraries choose their kernels and take their memory


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    host_array: np.ndarray  # pinned, [3 + blocks, rows]: ids, positions, slots, then the block tables
    host_tensor: Tensor  # the same memory, as torch sees it
    device_inputs: Tensor  # its copy on the device
    all_rows: Tensor  # the numbers of all rows
    logits: Tensor


class CudaGraphRunner:
    """The recorded decode steps of one model."""

    def __init__(self, forward: FusedModel, pool: KVPool) -> None:
        self._forward, self._pool = forward, pool
        self._device = pool.layers[0].device
        self._captured: dict[tuple[int, int], CapturedGraph] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()

    def can_replay(self, num_rows: int, max_keys: int) -> bool:
        """Whether a step of so many rows, the longest with so many keys, is to be replayed."""
        num_rows, blocks = self._bucket(num_rows, max_keys)
        return num_rows * blocks * self._pool.block_size <= MAX_TOTAL_KEYS

    def replay(
        self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, block_tables: list[np.ndarray]
    ) -> Tensor:
        """The logits of one token of each sequence, valid until the next call. Tables hold a sequence's blocks."""
        rows, blocks = self._bucket(len(ids), int(positions.max()) + 1)
        step = self._captured.get((rows, blocks)) or self._capture(rows, blocks)
        step.host_array[:] = 0
        step.host_array[:3, : len(ids)] = ids, positions, slots
        table = step.host_array[3:].reshape(rows, blocks)
        for row, known in enumerate(block_tables):
            table[row, : len(known)] = known[:blocks]
        step.device_inputs.copy_(step.host_tensor, non_blocking=True)
        step.graph.replay()
        return step.logits[: len(ids)]

    def _bucket(self, num_rows: int, max_keys: int) -> tuple[int, int]:
        return _next_power_of_2(num_rows), _next_power_of_2(
            -(-max(max_keys, MIN_KEYS_PER_ROW) // self._pool.block_size)
        )

    def _capture(self, num_rows: int, num_blocks: int) -> CapturedGraph:
        staging = torch.zeros(3 + num_blocks, num_rows, dtype=torch.int64).pin_memory()
        given = staging.to(self._device)
        every = torch.arange(num_rows, device=self._device)

        def forward() -> Tensor:
            tile = AttentionTile(
                0, num_rows, num_rows, 1, given[3:].view(-1), given[1].unsqueeze(1)
            )  # new: it keeps its masks
            return self._forward(given[0], given[1], AttentionMetadata(self._pool, given[2], [tile]), every)

        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARMUP_RUNS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
            logits = forward()
        recorded = CapturedGraph(graph, staging.numpy(), staging, given, every, logits)
        self._captured[num_rows, num_blocks] = recorded
        return recorded


def _next_power_of_2(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()
