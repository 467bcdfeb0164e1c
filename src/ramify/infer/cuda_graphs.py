"""Decode steps as CUDA graphs: captured once for each shape, then replayed by a single call.

A decode step is hundreds of kernels of a few microseconds each, and launching them one by one from Python takes several
times as long as they run. Shapes are rounded up so that few graphs are needed: rows to a power of two, and blocks per
row to a power of two. Padding rows write to block 0, which no request uses, and their logits are cut off. Weights are
updated in place, so graphs stay valid.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.model.fused_model import FusedModel
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool

MIN_KEYS_PER_ROW = 128
MAX_TOTAL_KEYS = 1 << 18  # of all rows; with more, padding costs more than launching
WARMUP_RUNS = 2  # runs before a capture, in which libraries choose their kernels and allocate memory


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    host_array: np.ndarray  # pinned, [3 + blocks, rows]: ids, positions, slots, then the block tables
    host_tensor: Tensor  # the same memory as a tensor
    device_inputs: Tensor  # its copy on the device
    all_rows: Tensor  # the indices of all rows
    logits: Tensor


class CudaGraphRunner:
    """The captured decode steps of one model."""

    def __init__(self, forward: FusedModel, pool: KVPool) -> None:
        self._forward, self._pool = forward, pool
        self._device = pool.layers[0].device
        self._captured: dict[tuple[int, int], CapturedGraph] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()

    def can_replay(self, num_rows: int, max_keys: int) -> bool:
        """Return whether a step of `num_rows` rows with at most `max_keys` keys should be replayed."""
        padded_rows, num_blocks = self._bucket(num_rows, max_keys)
        return padded_rows * num_blocks * self._pool.block_size <= MAX_TOTAL_KEYS

    def replay(
        self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, block_tables: list[np.ndarray]
    ) -> Tensor:
        """Return the logits of one token of each sequence, valid until the next call."""
        num_rows, num_blocks = self._bucket(len(ids), int(positions.max()) + 1)
        step = self._captured.get((num_rows, num_blocks)) or self._capture(num_rows, num_blocks)
        step.host_array[:] = 0
        step.host_array[:3, : len(ids)] = ids, positions, slots
        padded_tables = step.host_array[3:].reshape(num_rows, num_blocks)
        for row, block_table in enumerate(block_tables):
            padded_tables[row, : len(block_table)] = block_table[:num_blocks]
        step.device_inputs.copy_(step.host_tensor, non_blocking=True)
        step.graph.replay()
        return step.logits[: len(ids)]

    def _bucket(self, num_rows: int, max_keys: int) -> tuple[int, int]:
        num_blocks = -(-max(max_keys, MIN_KEYS_PER_ROW) // self._pool.block_size)
        return _next_power_of_2(num_rows), _next_power_of_2(num_blocks)

    def _capture(self, num_rows: int, num_blocks: int) -> CapturedGraph:
        host_tensor = torch.zeros(3 + num_blocks, num_rows, dtype=torch.int64).pin_memory()
        inputs = host_tensor.to(self._device)
        all_rows = torch.arange(num_rows, device=self._device)

        def forward() -> Tensor:
            # A new tile for each call, because tiles cache their masks.
            tile = AttentionTile(0, num_rows, num_rows, 1, inputs[3:].view(-1), inputs[1].unsqueeze(1))
            metadata = AttentionMetadata(self._pool, inputs[2], [tile])
            return self._forward(inputs[0], inputs[1], metadata, all_rows)

        warmup_stream = torch.cuda.Stream(self._device)
        warmup_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(warmup_stream):
            for _ in range(WARMUP_RUNS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(warmup_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
            logits = forward()
        captured = CapturedGraph(graph, host_tensor.numpy(), host_tensor, inputs, all_rows, logits)
        self._captured[num_rows, num_blocks] = captured
        return captured


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
