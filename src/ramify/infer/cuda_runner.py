"""Running steps on a GPU: the host prepares a step while the GPU computes the one before.

`launch` copies the inputs of a step, starts its kernels and returns; `StartedStep.wait` reads its tokens. A token that
the step before samples need not be known for that: its id is read on the device, where sampling has left it. Attention
follows a plan (`ramify.model.kernels.attention_plan`), which is kept while the same requests decode.

Steps of up to MAX_GRAPH_ROWS rows are CUDA graphs, captured for each number of rows and logits, rounded up, and then
replayed by a single call: launching a thousand kernels from Python takes longer than they run. Padding rows write to
block 0, which no request uses. Weights are updated in place, so graphs stay valid. Chunks of recurrent layers are
padded to a number that depends only on the rows; a step without long sequences has none, and its own graph. A step with
image tokens, which is part of a prompt's prefill, is not a graph: it runs the model's own code. If requests of a step
have a grammar, their masks are computed while the GPU runs the step, which is then sampled once more, with the masks.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.infer.grammar import GrammarState, mask_logits
from ramify.infer.metrics import EngineCounters
from ramify.infer.model_runner import ImageRows, ModelRunner, list_logit_rows
from ramify.infer.request import EngineRequest
from ramify.infer.scheduler import ScheduledChunk
from ramify.model.kernels.attention_plan import AttentionPlan, build_plan, order_by_prefix
from ramify.model.kernels.chunk_plan import MIN_CHUNK_ROWS, plan_chunks
from ramify.model.kernels.paged_attention import AttentionMetadata, DevicePlan, StepSequences
from ramify.model.kernels.recurrent_ops import DeltaRuleWeights
from ramify.model.load import LoadedModel

# Memory through which a step's inputs reach the GPU and its results come back, while steps follow each other.

NUM_HOST_COPIES = 3  # a step's inputs are copied while the next step is prepared


class UploadBuffer:
    """Numbers that change from step to step, at a fixed address on the device.

    Host memory is used in turns, because a copy is still under way when the next step is prepared.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._host: list[Tensor] = []
        self._next = 0
        self.device = torch.zeros(0, dtype=torch.int32, device=device)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> bool:
        """Make room for `capacity` numbers; return whether the device memory has moved."""
        if capacity <= len(self.device):
            return False
        capacity = 1 << (capacity - 1).bit_length()
        on_gpu = self.device.device.type == "cuda"
        self._host = [torch.zeros(capacity, dtype=torch.int32, pin_memory=on_gpu) for _ in range(NUM_HOST_COPIES)]
        self.device = torch.zeros(capacity, dtype=torch.int32, device=self.device.device)
        return True

    def upload(self, *arrays: np.ndarray) -> None:
        """Copy arrays of 32-bit or 64-bit numbers to the device, one after the other; the copy is asynchronous."""
        host = self._host[self._next]
        self._next = (self._next + 1) % NUM_HOST_COPIES
        view, end = host.numpy(), 0
        for array in arrays:
            numbers = array.view(np.int32)
            view[end : end + len(numbers)] = numbers
            end += len(numbers)
        self.device[:end].copy_(host[:end], non_blocking=True)


class DownloadBuffer:
    """Host memory for the results of one step: for each row a token and the bits of its logprob."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(max_rows, 2, dtype=torch.int32, pin_memory=self._on_gpu)
        self._event = torch.cuda.Event() if self._on_gpu else None

    def start(self, sampled: Tensor) -> None:
        """Begin to copy `sampled` [rows, 2]."""
        self._host[: len(sampled)].copy_(sampled, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Wait for the copy; return tokens and logprobs."""
        if self._event is not None:
            self._event.synchronize()
        results = self._host[:num_rows].numpy()
        return results[:, 0].tolist(), results[:, 1].copy().view(np.float32).tolist()


CAPTURE_LOCK = threading.Lock()  # a capture begins by waiting for the device, which breaks another engine's capture
MAX_GRAPH_ROWS = 1024
ROW_STEPS = ((8, 1), (128, 8), (256, 32), (512, 64), (MAX_GRAPH_ROWS, 128))  # up to so many rows, rounded up to this
LOGIT_STEP = 32  # of steps in which not every row has logits
INITIAL_PARTIALS, INITIAL_PLAN_INTS = 4096, 1 << 18


class StepShape(NamedTuple):
    """What a graph is captured for."""

    num_rows: int  # with padding
    num_logits: int  # with padding
    num_chunks: int  # of recurrent layers; with padding if the step can be a graph, 0 if it has no long sequences


@dataclass(slots=True)
class PreparedStep:
    """The host's side of a step. While the same requests decode, it is advanced from step to step."""

    chunks_by_row: list[ScheduledChunk]
    order: list[int]  # of the scheduled chunks
    requests: list[EngineRequest]  # of the scheduled chunks, in their order, if all of them decode; else empty
    positions: np.ndarray  # [rows], in the sequence; int32 as all of them
    rotary_positions: np.ndarray  # [1, rows], or [3, rows] if image tokens lie on a grid
    slots: np.ndarray
    logit_rows: np.ndarray
    temperatures: np.ndarray  # of the rows with logits
    seeds: np.ndarray
    grammars: list[tuple[int, GrammarState]]  # and the rows with logits that they apply to
    plan: AttentionPlan
    sequences: np.ndarray  # of the recurrent layers: the arrays of `StepSequences`, one after the other
    shape: StepShape


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that the GPU computes or has computed. `chunks` are in the order of the rows."""

    chunks: list[ScheduledChunk]
    wait: Callable[[], tuple[list[int], list[float]]]  # tokens and logprobs of the chunks that sample
    has_grammars: bool


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured step and the memory of its logits."""

    graph: Any
    logits: Tensor


class CudaModelRunner(ModelRunner):
    """A `ModelRunner` that can launch steps. Needs Triton."""

    def __init__(
        self,
        model: LoadedModel,
        counters: EngineCounters,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_requests: int,
        share_prefixes: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, counters, num_blocks=num_blocks, block_size=block_size, **options)
        from ramify.model.kernels.cuda.paged_attention import PagedAttention

        shape, device = model.shape, model.device
        self._kernels = PagedAttention(
            heads=_count_heads(model),
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=model.dtype,
            device=device,
            max_graph_rows=MAX_GRAPH_ROWS,
        )
        self._kernels.reserve_partials(INITIAL_PARTIALS)
        self._share_prefixes = share_prefixes
        num_rows = _round_up_rows(max_rows)
        self._max_sequences = max_requests if self.states else 0
        layers = self.fused_model.weights.layers if self.fused_model else ()
        self._has_delta_rule = any(isinstance(layer.recurrent, DeltaRuleWeights) for layer in layers)
        largest_shape = StepShape(num_rows, num_rows, num_rows // MIN_CHUNK_ROWS)
        self._rows = UploadBuffer(sum(self._list_part_sizes(largest_shape)), device)
        self._plan = UploadBuffer(INITIAL_PLAN_INTS, device)
        self._ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        max_logits = max(_round_up_rows(max_requests), _round_up_logits(max_requests))
        self._sampled = torch.zeros(max_logits, 2, dtype=torch.int32, device=device)
        self._results = [DownloadBuffer(len(self._sampled), device) for _ in range(NUM_HOST_COPIES)]
        self._num_launched = 0
        self._seen: set[StepShape] = set()  # that can become graphs
        self._drop_graphs()
        self._last: PreparedStep | None = None

    def _build_check_metadata(self, positions: Tensor) -> AttentionMetadata:
        from ramify.model.kernels.cuda.paged_attention import plan_one_sequence

        return plan_one_sequence(self.pool, _count_heads(self.model), 0, len(positions))

    def launch(self, chunks: Sequence[ScheduledChunk]) -> StartedStep:
        """Start a step and sample from its logits. Only tokens of requests that are sampled plainly are used."""
        prepared = self._advance(chunks)
        plan_changed, images = prepared is None, None
        if prepared is None:
            prepared = self._last = self._prepare(chunks)
            images = self._gather_images(prepared.chunks_by_row)
        else:  # sampled tokens are never image tokens
            plan_changed = self._extend_block_tables(prepared)
        if plan_changed:
            self._upload_plan(prepared.plan)
        self._upload_rows(prepared)
        logits = self._run_step(prepared, images)
        if prepared.grammars:
            mask_logits(logits, prepared.grammars)
            self._sample(logits, prepared.shape)
        result = self._results[self._num_launched % NUM_HOST_COPIES]
        self._num_launched += 1
        num_sampled = len(prepared.logit_rows)
        result.start(self._sampled[:num_sampled])
        wait = partial(result.read, num_sampled)
        return StartedStep(prepared.chunks_by_row, wait, bool(prepared.grammars))

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute the chunks; return them in the order of their rows, and the logits."""
        prepared = self._prepare(chunks)
        self._last = None
        self._upload_plan(prepared.plan)
        self._upload_rows(prepared)
        logits = self._compute_logits(prepared, self._gather_images(prepared.chunks_by_row))
        return prepared.chunks_by_row, logits[: len(prepared.logit_rows)]

    # -- the host's side -----------------------------------------------------------------------------------------------

    def _prepare(self, chunks: Sequence[ScheduledChunk]) -> PreparedStep:
        order = self._order_rows(chunks)
        chunks_by_row = [chunks[index] for index in order]
        tables = [self._block_table(chunk) for chunk in chunks_by_row]
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks_by_row])
        blocks = np.concatenate(
            [
                table[np.arange(chunk.start, chunk.stop) // self.block_size]
                for table, chunk in zip(tables, chunks_by_row)
            ]
        )
        logit_rows, num_tokens = list_logit_rows(chunks_by_row)
        sampling = [chunk.request for chunk in chunks_by_row if chunk.samples_next]
        all_decode = len(chunks) == num_tokens == len(logit_rows)
        num_rows = _round_up_rows(num_tokens)
        num_logits = num_rows if all_decode else min(num_rows, _round_up_logits(len(logit_rows)))
        starts, stops = [chunk.start for chunk in chunks_by_row], [chunk.stop for chunk in chunks_by_row]
        sequences, num_chunks = self._list_sequences(chunks_by_row, num_rows)
        kernel_shape = self._kernels.get_shape(num_rows, share=self._share_prefixes)
        return PreparedStep(
            chunks_by_row=chunks_by_row,
            order=order,
            requests=[chunk.request for chunk in chunks] if all_decode else [],
            positions=positions.astype(np.int32),
            rotary_positions=self._list_rotary_positions(chunks_by_row, positions).astype(np.int32),
            slots=(blocks * self.block_size + positions % self.block_size).astype(np.int32),
            logit_rows=np.array(logit_rows, dtype=np.int32),
            temperatures=np.array([request.sampling_params.temperature for request in sampling], dtype=np.float32),
            seeds=np.array([request.seed for request in sampling], dtype=np.uint64),
            grammars=[(row, request.grammar) for row, request in enumerate(sampling) if request.grammar is not None],
            plan=build_plan(tables, starts, stops, num_rows, kernel_shape),
            sequences=sequences,
            shape=StepShape(num_rows, num_logits, num_chunks),
        )

    def _list_rotary_positions(self, chunks: Sequence[ScheduledChunk], positions: np.ndarray) -> np.ndarray:
        if not self.has_grid_positions:
            return positions[np.newaxis]
        return np.concatenate([chunk.request.get_positions(chunk.start, chunk.stop) for chunk in chunks], axis=1)

    def _list_sequences(self, chunks: Sequence[ScheduledChunk], num_rows: int) -> tuple[np.ndarray, int]:
        """Return the arrays of `StepSequences`, one after the other, and the number of chunks of recurrent layers.

        There is nothing without such layers.
        """
        row_sequence = np.full(num_rows, -1, dtype=np.int32)
        sequences = np.zeros((3, min(num_rows, self._max_sequences)), dtype=np.int32)
        if not self._max_sequences:
            return sequences.ravel(), 0
        end = 0
        for index, chunk in enumerate(chunks):
            row_sequence[end : end + chunk.num_tokens] = index
            sequences[:, index] = end, end + chunk.num_tokens, chunk.request.state_slot
            end += chunk.num_tokens
        bounds_and_slots = sequences[:, : len(chunks) if self._has_delta_rule else 0].tolist()
        tables = plan_chunks(*bounds_and_slots, padded_rows=num_rows if num_rows <= MAX_GRAPH_ROWS else 0)
        return np.concatenate([row_sequence, sequences.ravel(), tables.ravel()]), tables.shape[1]

    def _order_rows(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Return the order of rows: decoding first, sequences with common blocks adjacent."""
        decoding = [index for index, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        order = order_by_prefix([self._block_table(chunks[index]) for index in decoding])
        return [decoding[index] for index in order] + [
            index for index, chunk in enumerate(chunks) if chunk.num_tokens > 1
        ]

    def _advance(self, chunks: Sequence[ScheduledChunk]) -> PreparedStep | None:
        """Return the last step advanced by a token if the same requests keep decoding and the plan has room."""
        last = self._last
        if last is None or not last.requests or [chunk.request for chunk in chunks] != last.requests:
            return None
        chunks_by_row = [chunks[index] for index in last.order]
        positions = np.array([chunk.start for chunk in chunks_by_row], dtype=np.int32)
        num_rows = len(positions)
        was_advanced = (positions == last.positions + 1).all() and (positions < last.plan.key_limits[:num_rows]).all()
        if not was_advanced or not all(chunk.request.block_table_len for chunk in chunks_by_row):
            return None
        last.chunks_by_row, last.positions = chunks_by_row, positions
        last.rotary_positions, last.slots = last.rotary_positions + np.int32(1), last.slots + np.int32(1)
        return last

    def _extend_block_tables(self, step: PreparedStep) -> bool:
        """Enter the blocks that requests have got since the last step; return whether there were any."""
        rows = np.flatnonzero(step.positions % self.block_size == 0).tolist()
        for row in rows:
            index = int(step.positions[row]) // self.block_size
            block = int(self._block_table(step.chunks_by_row[row])[index])
            step.plan.data[step.plan.table_starts[row] + index] = block
            step.slots[row] = block * self.block_size
        return bool(rows)

    def _upload_plan(self, plan: AttentionPlan) -> None:
        moved = self._plan.reserve(len(plan.data)), self._kernels.prepare(plan)
        if any(moved):
            self._drop_graphs()
        self._plan.upload(plan.data)
        self.counters.shared_keys += plan.shared_keys

    def _upload_rows(self, step: PreparedStep) -> None:
        """Copy what changes in every step. A token that is not known yet is named by its row in the last step."""
        num_rows, num_logits, _ = step.shape
        rows = np.zeros((5, num_rows), dtype=np.int32)  # ids, sources, positions, slots, rotary positions
        rows[1] = -1
        end = 0
        for chunk in step.chunks_by_row:
            request, start = chunk.request, end
            end += chunk.num_tokens
            if request.num_pending and chunk.stop == len(request.token_ids):
                rows[1, end - 1] = request.pending_row
            if chunk.num_tokens == 1:
                rows[0, start] = request.token_ids[chunk.start]
            else:
                rows[0, start:end] = request.token_ids[chunk.start : chunk.stop]
        rows[2, :end], rows[3, :end], rows[4, :end] = step.positions, step.slots, step.rotary_positions[0]
        logits = np.zeros((2, num_logits), dtype=np.int32)
        temperatures, seeds = logits[1].view(np.float32), np.zeros(num_logits, dtype=np.uint64)
        logits[0, : len(step.logit_rows)] = step.logit_rows
        temperatures[: len(step.temperatures)], seeds[: len(step.seeds)] = step.temperatures, step.seeds
        # 64-bit numbers first, aligned
        self._rows.upload(seeds, rows.ravel(), logits.ravel(), step.sequences)

    # -- the GPU's side ------------------------------------------------------------------------------------------------

    def _run_step(self, step: PreparedStep, images: ImageRows | None) -> Tensor:
        """Run and sample the uploaded step, by a graph if there is one or the shape has been seen before."""
        if images is not None:
            return self._sample(self._compute_logits(step, images), step.shape)
        shape = step.shape
        captured = self._graphs.get(shape)
        if captured is None and self._graph_pool is not None and shape in self._seen:
            captured = self._graphs[shape] = self._capture(shape)
        if captured is None:
            if shape.num_rows <= MAX_GRAPH_ROWS:
                self._seen.add(shape)
            return self._forward_and_sample(shape)
        self.counters.replayed_steps += 1
        captured.graph.replay()
        return captured.logits

    def _drop_graphs(self) -> None:
        """Begin with no graphs: memory that they read has moved."""
        self._graphs: dict[StepShape, CapturedGraph] = {}
        can_capture = self.model.device.type == "cuda" and self.fused_model is not None
        self._graph_pool = torch.cuda.graph_pool_handle() if can_capture else None  # ends with the last graph in it

    def _capture(self, shape: StepShape) -> CapturedGraph:
        """Capture a step; nothing is computed."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # torch's default is shared by all threads
        capture = torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local")
        with CAPTURE_LOCK, capture:
            logits = self._forward_and_sample(shape)
        return CapturedGraph(graph, logits)

    def _forward_and_sample(self, shape: StepShape) -> Tensor:
        return self._sample(self._forward_text(shape), shape)

    def _sample(self, logits: Tensor, shape: StepShape) -> Tensor:
        """Sample from the logits of the uploaded step; return them."""
        from ramify.model.kernels.cuda.sampling import sample_rows

        rows = self._split_rows(shape)
        sample_rows(logits, rows.temperatures, rows.seeds, rows.positions, rows.logit_rows, self._sampled)
        return logits

    def _compute_logits(self, step: PreparedStep, images: ImageRows | None) -> Tensor:
        """Return the logits of the uploaded step."""
        if images is None:
            return self._forward_text(step.shape)
        padding = step.shape.num_rows - step.rotary_positions.shape[1]
        positions = self._to_device(np.pad(step.rotary_positions, ((0, 0), (0, padding))))
        rows = self._split_rows(step.shape)
        ids, metadata = self._gather_ids(rows), self._build_metadata(rows, fused=False)
        return self._forward(ids, positions.squeeze(0), metadata, rows.logit_rows, images)

    def _forward_text(self, shape: StepShape) -> Tensor:
        """Return the logits of the uploaded step, which has no image tokens. Can be captured."""
        rows = self._split_rows(shape)
        metadata = self._build_metadata(rows, fused=self.fused_model is not None)
        return self.forward(self._gather_ids(rows), rows.rotary_positions, metadata, rows.logit_rows)

    def _gather_ids(self, rows: "DeviceRows") -> Tensor:
        """Return the token ids; those that the host does not know yet are read from the last step's result."""
        from ramify.model.kernels.cuda.sampling import gather_ids

        gather_ids(rows.ids, rows.sources, self._sampled, self._ids)
        return self._ids[: len(rows.ids)]

    def _build_metadata(self, rows: "DeviceRows", *, fused: bool) -> AttentionMetadata:
        plan = DevicePlan(self._plan.device, rows.positions, self._kernels, rows.sequences)
        return AttentionMetadata(self.pool, rows.slots if fused else rows.slots.long(), plan=plan, states=self.states)

    def _list_part_sizes(self, shape: StepShape) -> list[int]:
        """Return how many numbers the parts of `DeviceRows` have, in 32 bits."""
        num_rows, num_logits, num_chunks = shape
        sizes = [2 * num_logits] + [num_rows] * 5 + [num_logits] * 2
        if self._max_sequences:
            sizes += [num_rows] + [min(num_rows, self._max_sequences)] * 3 + [3 * num_chunks] * 2
        return sizes

    def _split_rows(self, shape: StepShape) -> "DeviceRows":
        sizes = self._list_part_sizes(shape)
        seeds, *rows = self._rows.device[: sum(sizes)].split(sizes)
        sequences = None
        if self._max_sequences:
            sequences = StepSequences(*rows[7:11], *(table.view(-1, 3) for table in rows[11:]))
        ids, sources, positions, slots, rotary_positions, logit_rows, temperatures = rows[:7]
        return DeviceRows(
            seeds.view(torch.int64),
            ids,
            sources,
            positions,
            slots,
            rotary_positions,
            logit_rows,
            temperatures.view(torch.float32),
            sequences,
        )


class DeviceRows(NamedTuple):
    """The parts of the uploaded rows."""

    seeds: Tensor
    ids: Tensor  # of the tokens that the host knows
    sources: Tensor  # the row of the last step that sampled the token; -1 if the host knows it
    positions: Tensor
    slots: Tensor
    rotary_positions: Tensor
    logit_rows: Tensor
    temperatures: Tensor
    sequences: StepSequences | None  # if there are recurrent layers


def _round_up_rows(num_rows: int) -> int:
    step = next((step for limit, step in ROW_STEPS if num_rows <= limit), ROW_STEPS[-1][1])
    return -(-num_rows // step) * step


def _round_up_logits(num_logits: int) -> int:
    return -(-num_logits // LOGIT_STEP) * LOGIT_STEP


def _count_heads(model: LoadedModel) -> int:
    return model.module.config.get_text_config().num_attention_heads
