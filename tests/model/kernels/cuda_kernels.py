"""Tests of the engine's kernels for CUDA against plain PyTorch, on a GPU or in Triton's interpreter.

`test_cuda_kernels.py` runs them.
"""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.core.errors import ModelUnsupported
from ramify.infer.cuda_runner import CudaModelRunner
from ramify.infer.request import SamplingParams
from ramify.infer.sampler import uniform_noise
from ramify.model.delta_rule import ChunkBatch, gated_delta_rule
from ramify.model.forest_chunks import ForestChunks, ForestSegments, find_ancestors
from ramify.model.forest_recurrence import (
    PathTables,
    TrackTables,
    convolve_paths,
    measure_kernel_error,
    pass_tracks,
)
from ramify.model.fused_model import _check_products, build_fused_model
from ramify.model.kernels import attention_plan
from ramify.model.kernels.attention_plan import build_plan, order_by_prefix
from ramify.model.kernels.chunk_plan import CHUNK_SIZE, MIN_CHUNK_ROWS, plan_chunks
from ramify.model.kernels.decoder_ops import LayerWeights
from ramify.model.kernels.paged_attention import AttentionTile, StepSequences
from ramify.model.kernels.quantization import QuantizedMatrix, dequantize_matrix, quantize_matrix
from ramify.model.kernels.recurrent_ops import DeltaRuleWeights, RecurrentWeights, ShortConvWeights
from ramify.model.kernels.recurrent_ops import compute_recurrent_layer as reference_recurrent
from ramify.model.kernels.state_pool import StatePool, StateSpec
from ramify.model.recurrent_layers import check_kernels
from ramify.model.tree_attention import BLOCK_SIZE, BlockMask
from ramify.train.lm_head import LogitTransform
from tests.support import reference_ops as reference
from tests.support.training import HYBRIDS, build_policy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF_DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16
# Padding rows of the interpreter divide 0 by 0, or hold what was in memory; they are not stored or read.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
long_in_the_interpreter = pytest.mark.skipif(
    DEVICE.type == "cpu" and not os.environ.get("RAMIFY_FULL"), reason="ten seconds in the interpreter of Triton"
)


def build_step(block_size: int, rng: np.random.Generator):
    """Return block tables and ranges of two groups with nested prefixes, and of two chunks of prompts."""
    blocks = iter(rng.permutation(np.arange(1, 200)).tolist())

    def take(count: int) -> list[int]:
        return [next(blocks) for _ in range(count)]

    trunk, tables = take(3), []
    for _ in range(2):
        prompt = trunk + take(4)
        for _ in range(2):
            history = prompt + take(2)
            tables += [np.array(history + take(2)) for _ in range(2)]
    tables = [tables[index] for index in order_by_prefix(tables)]
    starts = [block_size * (len(table) - 2) + int(rng.integers(0, 2 * block_size)) for table in tables]
    stops = [start + 1 for start in starts]
    for start, count in ((0, block_size + 3), (5, 2 * block_size)):
        tables.append(np.array(take(-(-(start + count) // block_size))))
        starts, stops = [*starts, start], [*stops, start + count]
    return tables, starts, stops


def compute_weights(
    scores: torch.Tensor, softcap: float, sinks: torch.Tensor | None, masked: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the softmax over the last axis, with a soft cap, masked scores, and a sink beside them."""
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if masked is None else scores.masked_fill(masked, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype"),
    [
        pytest.param(4, 2, 16, 16, 0, 0.0, torch.float32, marks=long_in_the_interpreter),
        (6, 2, 24, 4, 0, 0.0, torch.float32),
        (4, 1, 32, 4, 20, 0.7, torch.float16),  # with sinks
    ],
)
def test_paged_attention_equals_a_softmax_over_all_keys(
    heads, kv_heads, head_dim, block_size, window, softcap, dtype, monkeypatch
):
    from ramify.model.kernels.cuda.paged_attention import PagedAttention

    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", block_size)
    rng = np.random.default_rng(heads)
    torch.manual_seed(heads)
    tables, starts, stops = build_step(block_size, rng)
    positions = [position for start, stop in zip(starts, stops) for position in range(start, stop)]
    kernels = PagedAttention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=DEVICE
    )
    plan = build_plan(tables, starts, stops, len(positions), kernels.get_shape(len(positions)))
    assert plan.shared_keys > 0
    kernels.prepare(plan)
    cache = torch.randn(200 * block_size, 2 * kv_heads * head_dim, device=DEVICE).to(dtype)
    query = torch.randn(len(positions), heads, head_dim, device=DEVICE).to(dtype)
    scores: Any = {"scaling": head_dim**-0.5, "window": window, "softcap": softcap}
    scores["sinks"] = torch.randn(heads, device=DEVICE) if softcap else None
    device_plan, device_positions = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (plan.data, positions)
    )
    out = kernels(query, cache, device_plan, device_positions, **scores)
    row = 0
    for table, start, stop in zip(tables, starts, stops):
        slots = torch.from_numpy((table[:, None] * block_size + np.arange(block_size)).ravel()[:stop]).to(DEVICE)
        key, value = cache[slots].float().view(stop, 2, kv_heads, head_dim).unbind(1)
        for position in range(start, stop):
            first = max(0, position + 1 - window) if window else 0
            keys, values = (part[first : position + 1].repeat_interleave(heads // kv_heads, 1) for part in (key, value))
            products = torch.einsum("hd,khd->hk", query[row].float(), keys) * head_dim**-0.5
            expected = torch.einsum("hk,khd->hd", compute_weights(products, softcap, scores["sinks"]), values)
            assert (out[row].float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3)
            row += 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "dtype"),
    [
        (4, 1, 24, 0, 0.0, torch.float32),
        (6, 2, 16, 100, 0.7, torch.float16),  # with sinks
        pytest.param(3, 3, 16, 0, 0.0, torch.float16, marks=long_in_the_interpreter),
        pytest.param(2, 2, 16, 3, 0.0, torch.float32, marks=long_in_the_interpreter),
    ],
)
def test_chunk_items_equal_a_softmax_over_all_keys(heads, kv_heads, head_dim, window, softcap, dtype):
    """Chunks behind some keys and at the start, beside a decoding sequence; pieces of keys change nothing."""
    from ramify.model.kernels.cuda.paged_attention import PagedAttention

    torch.manual_seed(heads)
    block_size, ranges = 16, [(20, 21), (0, 40), (110, 150)]
    blocks = iter(np.random.default_rng(0).permutation(np.arange(1, 32)).tolist())
    tables = [np.array([next(blocks) for _ in range(-(-stop // block_size))]) for _, stop in ranges]
    starts, stops = ([bounds[end] for bounds in ranges] for end in (0, 1))
    positions = np.concatenate([np.arange(*bounds) for bounds in ranges])
    kernels = PagedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=DEVICE,
        max_graph_rows=0,
    )
    cache = torch.randn(32 * block_size, 2 * kv_heads * head_dim, device=DEVICE).to(dtype)
    query = torch.randn(len(positions), heads, head_dim, device=DEVICE).to(dtype)
    shape, outputs = kernels.get_shape(len(positions)), []
    score_options: Any = {"scaling": head_dim**-0.5, "window": window, "softcap": softcap}
    sinks = score_options["sinks"] = torch.randn(heads, device=DEVICE) if softcap else None
    for num_programs in (1, 400):
        plan = build_plan(tables, starts, stops, len(positions), replace(shape, num_programs=num_programs))
        assert plan.num_chunk_items > 0 and bool(plan.num_partials) == (num_programs == 400)
        kernels.prepare(plan)
        device_plan, device_positions = (
            torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (plan.data, positions)
        )
        outputs.append(kernels(query, cache, device_plan, device_positions, **score_options))
    expected = []
    for table, (start, stop), rows in zip(tables, ranges, query.split([stop - start for start, stop in ranges])):
        slots = torch.from_numpy((table[:, None] * block_size + np.arange(block_size)).ravel()[:stop]).to(DEVICE)
        key, value = cache[slots].float().view(stop, 2, kv_heads, head_dim).unbind(1)
        key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in (key, value))
        distance = torch.arange(start, stop, device=DEVICE)[:, None] - torch.arange(stop, device=DEVICE)
        masked = (distance < 0) | (distance >= (window or stop))
        products = torch.einsum("qhd,khd->hqk", rows.float(), key) * head_dim**-0.5
        weights = compute_weights(products, softcap, None if sinks is None else sinks[:, None], masked)
        expected.append(torch.einsum("hqk,khd->qhd", weights, value))
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert (outputs[0].float() - torch.cat(expected)).abs().max() < limit
    assert (outputs[1].float() - outputs[0].float()).abs().max() < limit / 4


@pytest.mark.parametrize(("tile", "softcap"), [(32, 0.0), (64, 0.0), (64, 0.7)])
def test_tiles_of_tree_attention_equal_the_reference_forward_and_backward(tile, softcap):
    """As on GPUs with little shared memory, where a program computes only a part of its block."""
    from ramify.model.kernels.cuda import tree_attention as kernels

    tokens, heads, kv_heads, width, scale = 128, 2, 1, 16, 0.25
    torch.manual_seed(0)
    shapes = [(tokens, count, width) for count in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes)
    end = np.concatenate([np.full(40, 128), np.full(60, 100), np.full(28, 128)]).astype(np.int32)  # a fork
    position = np.arange(tokens, dtype=np.int32)
    mask = BlockMask.build(end, position, 0, DEVICE)
    out, d_query = torch.empty_like(query), torch.empty_like(query)
    d_key, d_value = torch.empty_like(key), torch.empty_like(value)
    lse, delta = (torch.empty(heads, tokens, device=DEVICE) for _ in range(2))
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "D": width, "BLOCK": BLOCK_SIZE, "TILE": tile, "WINDOW": 0}
    constants: Any = {**sizes, "SCALE": scale, "SOFTCAP": softcap, "PRECISION": "ieee"}
    kernels.set_triton_allocator()
    qkv, masks = (query.detach(), key.detach(), value.detach()), (mask.end, mask.position)
    num_tiles = tokens // tile
    forward_inputs = *qkv, query.detach(), *masks
    kernels._forward[(heads, num_tiles)](*forward_inputs, mask.kv_lists, out, lse, tokens, HAS_SINKS=False, **constants)
    inputs, saved = (*qkv, *masks), (grad.detach(), lse, delta)
    kernels._backward_queries[(heads, num_tiles)](*inputs, mask.kv_lists, out, *saved, d_query, tokens, **constants)
    kernels._backward_keys[(kv_heads, num_tiles)](*inputs, mask.q_lists, *saved, d_key, d_value, tokens, **constants)
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    tree = torch.from_numpy(end).to(DEVICE), torch.from_numpy(position).to(DEVICE)
    expected = reference.tree_attention(*batched, *tree, scale=scale, softcap=softcap)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad.transpose(0, 1).unsqueeze(0))
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    for actual, expected_grad in zip((d_query, d_key, d_value), expected_grads):
        assert (actual - expected_grad).norm() <= 1e-5 * expected_grad.norm()


@pytest.mark.parametrize(("softcap", "window"), [(0.0, 20), (0.7, 0)])
def test_tree_attention_with_sinks_equals_the_reference_forward_and_backward(softcap, window):
    from ramify.model.kernels.cuda.tree_attention import tree_attention_op

    tokens, heads, kv_heads, width, scale = 128, 2, 1, 16, 0.25
    torch.manual_seed(1)
    shapes = [(tokens, count, width) for count in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes)
    sinks = torch.tensor([-1.5, 2.0], device=DEVICE, requires_grad=True)
    end = np.concatenate([np.full(40, 128), np.full(60, 100), np.full(28, 128)]).astype(np.int32)  # a fork
    position = np.concatenate([np.arange(100), np.arange(40, 68)]).astype(np.int32)
    mask = BlockMask.build(end, position, window, DEVICE)
    operator: Any = tree_attention_op
    out, _ = operator(query, key, value, sinks, *mask, scale, window, BLOCK_SIZE, softcap)
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    tree = torch.from_numpy(end).to(DEVICE), torch.from_numpy(position).to(DEVICE)
    scores = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    expected = reference.tree_attention(*batched, *tree, **scores)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    inputs = query, key, value, sinks
    grads, expected_grads = (torch.autograd.grad(output, inputs, grad) for output in (out, expected))
    for actual, expected_grad in zip(grads, expected_grads):
        assert (actual - expected_grad).norm() <= 1e-5 * expected_grad.norm()


class RecurrentSteps:
    """A recurrent layer, and equal states in slots for the kernels and for plain PyTorch."""

    def __init__(self, weights: RecurrentWeights, columns: int, specs: list[StateSpec]):
        self.weights, self.columns = weights, columns
        self.states, self.reference_states = (StatePool(specs, 8, DEVICE) for _ in range(2))
        for tensor, other in zip(self.states.tensors, self.reference_states.tensors):
            other.copy_(tensor.normal_())

    def project(self, rows: int) -> torch.Tensor:
        """Return random rows of the first projection."""
        return torch.randn(rows, self.columns, device=DEVICE).to(self.weights.conv.dtype)

    def run(self, projected: torch.Tensor, lengths: list[int], slots: list[int], num_unused: int = 0) -> torch.Tensor:
        """Run a step with the kernels. Unused sequences have a row of padding each, as a graph has."""
        from ramify.model.kernels.cuda.recurrent_ops import compute_recurrent_layer

        starts, unused = np.cumsum([0, *lengths]), [0] * num_unused
        padded_rows = (starts[-1] + num_unused) * bool(num_unused)
        tables = plan_chunks(starts[:-1].tolist(), starts[1:].tolist(), slots, int(padded_rows))
        numbers = [
            [*np.repeat(np.arange(len(lengths)), lengths), *(-1 for _ in unused)],
            [*starts[:-1], *unused],
            [*starts[1:], *unused],
            [*slots, *unused],
            *tables,
        ]
        sequences = StepSequences(*(torch.from_numpy(np.asarray(part, dtype=np.int32)).to(DEVICE) for part in numbers))
        padding = projected.new_full((num_unused, projected.shape[1]), torch.nan)
        out = compute_recurrent_layer(self.weights, torch.cat([projected, padding]), sequences, self.states, 3, 1e-6)
        return out[: starts[-1]]

    def run_reference(self, projected: torch.Tensor, lengths: list[int], slots: list[int]) -> torch.Tensor:
        """Run a step in plain PyTorch, a sequence after the other."""
        parts = []
        for rows, slot in zip(projected.split(lengths), slots):
            index = torch.tensor([slot], device=DEVICE)
            tile = AttentionTile(0, len(rows), 1, len(rows), index, index, state_slots=index)
            parts.append(reference_recurrent(self.weights, rows, tile, self.reference_states, 3, 1e-6))
        return torch.cat(parts)

    def check_short_sequences(self) -> None:
        """Compare two steps of decoding sequences, sequences shorter and longer than a convolution, and padding."""
        for lengths, slots in (([1, 1, 2, 3, 9], [5, 1, 0, 4, 2]), ([3, 1, 6, 1, 2], [2, 5, 1, 4, 0])):
            projected = self.project(sum(lengths))
            expected = self.run_reference(projected, lengths, slots)
            torch.testing.assert_close(self.run(projected, lengths, slots, 2), expected, atol=1e-5, rtol=1e-4)
            for actual, reference_state in zip(self.states.tensors, self.reference_states.tensors):
                torch.testing.assert_close(actual, reference_state, atol=1e-5, rtol=1e-4)


def build_delta_rule_steps(
    heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32
) -> RecurrentSteps:
    """Return steps of a layer with the gated delta rule. Half of its heads forget within a few tokens."""
    torch.manual_seed(heads)
    channels, width = 2 * key_heads * key_dim + heads * value_dim, 4
    weights = DeltaRuleWeights(
        torch.randn(channels, width, device=DEVICE).to(dtype),
        torch.tensor([-1.0, 3.0], device=DEVICE).repeat(heads)[:heads].to(dtype),
        *(torch.randn(size, device=DEVICE).to(dtype) for size in (heads, value_dim)),
        key_heads,
        key_dim,
    )
    specs = [
        StateSpec(3, "conv", 0, (channels, width), dtype),
        StateSpec(3, "recurrent", 0, (heads, key_dim, value_dim), torch.float32),
    ]
    return RecurrentSteps(weights, sum(weights.widths), specs)


@pytest.mark.parametrize(("heads", "key_heads"), [pytest.param(4, 2, marks=long_in_the_interpreter), (3, 3)])
def test_delta_rule_equals_plain_pytorch(heads, key_heads):
    build_delta_rule_steps(heads, key_heads, 8, 24).check_short_sequences()


@pytest.mark.parametrize(("channels", "width", "has_bias"), [(520, 3, False), (24, 5, True)])
def test_gated_short_convolution_equals_plain_pytorch(channels, width, has_bias):
    """Decoding sequences and chunks, shorter and longer than the window; the second step continues the first."""

    torch.manual_seed(width)
    bias = torch.randn(channels, device=DEVICE) if has_bias else None
    weights = ShortConvWeights(torch.randn(channels, width, device=DEVICE), bias)
    specs = [StateSpec(3, "conv", 0, (channels, width), torch.float32)]
    RecurrentSteps(weights, 3 * channels, specs).check_short_sequences()


MIXED_LENGTHS = [1, 1, 63, 5, 64, 65, 200]


@pytest.mark.parametrize(
    ("lengths", "heads", "key_heads", "key_dim", "value_dim", "dtype", "num_unused"),
    [
        ([1, 65], 2, 1, 8, 24, torch.float32, 30),  # with a chunk of padding
        pytest.param(MIXED_LENGTHS, 2, 2, 64, 128, torch.float16, 0, marks=long_in_the_interpreter),
        pytest.param(MIXED_LENGTHS, 4, 2, 128, 24, torch.float32, 40, marks=long_in_the_interpreter),
    ],
)
def test_prompts_in_chunks_have_the_outputs_and_states_of_plain_pytorch(
    lengths, heads, key_heads, key_dim, value_dim, dtype, num_unused
):
    """Beside decoding sequences and a short chunk, with and without the padding of a graph."""
    steps = build_delta_rule_steps(heads, key_heads, key_dim, value_dim, dtype)
    slots = [5, 1, 0, 4, 2, 7, 3][: len(lengths)]
    projected = steps.project(sum(lengths))
    limit = 1e-5 if dtype == torch.float32 else 3e-3
    expected = steps.run_reference(projected, lengths, slots)
    out = steps.run(projected, lengths, slots, num_unused)
    for actual, rows in zip(out.split(lengths), expected.split(lengths)):
        assert (actual.float() - rows).norm() <= limit * rows.norm()
    for tensors in zip(steps.states.tensors, steps.reference_states.tensors):
        for actual, state in zip(*tensors):  # of each slot, used or not
            assert (actual.float() - state.float()).norm() <= limit * state.float().norm()


@long_in_the_interpreter
def test_a_prompt_has_the_same_outputs_in_one_step_in_two_and_row_by_row():
    length = 130
    cuts = {"one step": [length], "two steps": [70, 60], "rows": [MIN_CHUNK_ROWS - 1] * 4 + [6]}
    results: dict[str, list[torch.Tensor]] = {}
    for name, pieces in cuts.items():
        steps = build_delta_rule_steps(2, 1, 16, 24)
        parts = [steps.run(rows, [len(rows)], [6]) for rows in steps.project(length).split(pieces)]
        results[name] = [torch.cat(parts), *steps.states.tensors]
    for name in ("one step", "two steps"):
        assert not torch.equal(results[name][0], results["rows"][0])  # chunks are rounded differently
        for actual, expected in zip(results[name], results["rows"]):
            assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_long_sequences_of_a_step_have_chunks_and_a_track():
    bounds = [0, 1, MIN_CHUNK_ROWS, MIN_CHUNK_ROWS + 64, MIN_CHUNK_ROWS + 64 + 130]
    chunks, tracks = plan_chunks(bounds[:-1], bounds[1:], [9, 8, 7, 6], 500)
    assert len(chunks) == len(tracks) == 500 // MIN_CHUNK_ROWS
    first, last = bounds[2], bounds[3]
    expected = [[first, last, 7], [last, last + 64, -1], [last + 64, last + 128, -1], [last + 128, last + 130, 6]]
    assert chunks[:4].tolist() == expected and tracks[:2].tolist() == [[0, 1, 7], [1, 4, 6]]
    assert (chunks[4:] == [0, 0, -1]).all() and (tracks[2:] == [0, 0, -1]).all()
    assert plan_chunks([0], [MIN_CHUNK_ROWS - 1], [3], 500).shape == (2, 0, 3)
    assert plan_chunks([0, 70], [70, 70 + MIN_CHUNK_ROWS], [3, 4]).shape == (2, 3, 3)
    lengths = list(range(MIN_CHUNK_ROWS, 300))
    assert all(plan_chunks([0], [length], [0]).shape[1] <= length // MIN_CHUNK_ROWS for length in lengths)


@pytest.mark.parametrize("rotated", [8, 0])
def test_rotation_of_gated_queries_equals_plain_formulas(rotated):
    """A part of each head is rotated, a gate follows each query, and the weights of the norms have an offset."""
    from ramify.model.kernels.cuda.decoder import _gate_heads, _rotate_and_cache

    torch.manual_seed(0)
    rows, heads, kv_heads, width = 3, 3, 1, 16
    qkv = torch.randn(rows, (2 * heads + 2 * kv_heads) * width, device=DEVICE)
    rope, norms = torch.randn(20, 2 * rotated, device=DEVICE), torch.randn(2, width, device=DEVICE)
    positions, slots = torch.tensor([[3, 0, 19], [2, 0, 1]], dtype=torch.int32, device=DEVICE)
    heads_and_gates, key, value = qkv.view(rows, -1, width).split([2 * heads, kv_heads, kv_heads], 1)
    query, gate = heads_and_gates.view(rows, heads, 2, width).clone().unbind(2)
    cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, -1)
    expected = []
    for part, norm in ((query, norms[0]), (key, norms[1])):
        normed = torch.nn.functional.rms_norm(part, (width,), 1 + norm, 1e-6)
        first, rest = normed.split([rotated, width - rotated], -1)
        expected.append(torch.cat([first * cos + first.roll(rotated // 2, -1) * sin, rest], -1))
    cache = torch.zeros(3, 2, kv_heads, width, device=DEVICE)
    constants: Any = {"HEADS": heads, "KV_HEADS": kv_heads, "D": width, "HALF": 8, "TILE": 8}
    constants |= {"ROTATED": rotated, "QUERY_STRIDE": 2 * width, "EPS": 1e-6, "OFFSET": 1.0}
    _rotate_and_cache[(rows, 1)](
        qkv, qkv, *norms, rope, positions, slots, cache, **constants, HAS_BIAS=False, HAS_NORM=True
    )
    torch.testing.assert_close(qkv[:, : 2 * heads * width].view(rows, heads, 2, width)[:, :, 0], expected[0])
    torch.testing.assert_close(cache[slots.long()], torch.stack((expected[1], value), 1))
    out = query.flatten(1).clone()
    _gate_heads[(rows, 1)](out, qkv, qkv.stride(0), HEADS=heads, D=width, BLOCK=64)
    torch.testing.assert_close(out, (query * gate.sigmoid()).flatten(1))


SEGMENT_LENGTHS, SEGMENT_PARENTS = [66, 2, 5, 4], [-1, 0, 0, -1]  # a fork in the second chunk, and a second tree


def build_segments() -> ForestSegments:
    stop = np.cumsum(SEGMENT_LENGTHS)
    arrays = (stop - SEGMENT_LENGTHS, stop, SEGMENT_PARENTS)
    return ForestSegments(*(np.array(array, np.int32) for array in arrays))


@long_in_the_interpreter  # `measure_kernel_error` compares the same on a forest of the same structure
@pytest.mark.parametrize("key_heads", [1, 2])
def test_tracks_of_chunks_have_the_outputs_and_gradients_of_the_delta_rule_in_float64(key_heads):
    segments, tokens = build_segments(), sum(SEGMENT_LENGTHS)
    torch.manual_seed(0)
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, key_heads, 12), dim=-1) for _ in range(2))
    value, scalars = torch.randn(tokens, 2, 20), torch.rand(2, tokens, 2)
    log_decay = -scalars[0] * torch.tensor([0.25, 100.0])  # within a chunk, the second head forgets everything
    tensors = [query, key, value, log_decay, scalars[1]]
    inputs = [tensor.to(DEVICE).requires_grad_() for tensor in tensors]
    exact_inputs = [tensor.double().requires_grad_() for tensor in tensors]
    chunks = ForestChunks.from_segments(segments, CHUNK_SIZE)
    out = pass_tracks(*inputs, TrackTables.from_chunks(chunks, DEVICE))
    exact = gated_delta_rule(*exact_inputs, ChunkBatch.from_chunks(chunks))
    gradient = torch.randn_like(exact)
    results = [out, *torch.autograd.grad(out, inputs, gradient.to(out))]
    for actual, expected in zip(results, [exact, *torch.autograd.grad(exact, exact_inputs, gradient)]):
        assert (actual.cpu() - expected).norm() <= 1e-5 * expected.norm()


def test_tracks_of_a_forest_are_rounded_like_its_paths():
    """The branches fork within the second chunk of their path."""
    torch.manual_seed(0)
    lengths = [70, 3, 60]
    tokens, starts = sum(lengths), np.cumsum([0, *lengths])
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, 1, 16), dim=-1) for _ in range(2))
    tensors = [part.to(DEVICE, HALF_DTYPE) for part in (query, key, torch.randn(tokens, 1, 16))]
    tensors += [-torch.rand(tokens, 1, device=DEVICE) / 4, torch.rand(tokens, 1, device=DEVICE)]

    def compute(index: list[int], *arrays: list[int]) -> torch.Tensor:
        segments = ForestSegments(*(np.array(array, np.int32) for array in arrays))
        tables = TrackTables.from_chunks(ForestChunks.from_segments(segments, CHUNK_SIZE), DEVICE)
        return pass_tracks(*(tensor[index] for tensor in tensors), tables)

    out = compute(list(range(tokens)), starts[:-1].tolist(), starts[1:].tolist(), [-1, 0, 0])
    for start, stop in ((70, 73), (73, 133)):
        path = [*range(70), *range(start, stop)]
        assert torch.equal(out[path], compute(path, [0], [len(path)], [-1]))


def test_sums_of_rows_are_exact_and_in_the_order_of_the_rows():
    from ramify.model.kernels.cuda.row_sums import sum_rows

    rows = torch.randn(9, 2, 600, device=DEVICE)
    token_rows = torch.tensor([0, 7, 2, 3, 8, 1, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    first = torch.tensor([0, 1, 5, 6, 9], dtype=torch.int32, device=DEVICE)
    expected = [rows[0], rows[7] + rows[2] + rows[3] + rows[8], rows[1], rows[4] + rows[5] + rows[6]]
    assert torch.equal(sum_rows(rows, token_rows, first), torch.stack(expected))


@long_in_the_interpreter  # a shorter one: the measured error of linear attention
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
def test_the_measured_error_of_the_kernels_is_rounding(dtype, limit):
    assert 0 < measure_kernel_error(1, 2, 12, 20, dtype, DEVICE) < limit


@pytest.mark.parametrize(
    ("heads", "dtype", "limit"),
    [
        (1, torch.float32, 1e-5),
        pytest.param(4, torch.float32, 1e-5, marks=long_in_the_interpreter),
        pytest.param(2, torch.float16, 3e-3, marks=long_in_the_interpreter),
    ],
)
def test_the_measured_error_of_linear_attention_is_rounding(heads, dtype, limit):
    key_heads = max(1, heads // 2)
    assert 0 < measure_kernel_error(key_heads, heads, 12, 20, dtype, DEVICE, has_correction=False) < limit


class RuleRecorder(TorchDispatchMode):
    """Records for each call of the kernels of recurrent states whether there were strengths."""

    def __init__(self) -> None:
        super().__init__()
        self.has_strength: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.ramify.gated_delta_rule.default:
            self.has_strength.append(args[4] is not None)
        return func(*args, **(kwargs or {}))


@long_in_the_interpreter
@pytest.mark.parametrize(("shape", "has_strength"), [("qwen3_5", True), ("granitemoehybrid", False)])
def test_the_kernels_of_a_model_with_states_are_checked(shape, has_strength):
    model = build_policy(HYBRIDS[shape]).model
    with RuleRecorder() as recorder:
        check_kernels(model, torch.float32, DEVICE)
    assert recorder.has_strength == [has_strength]


@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (3, True)])
def test_convolutions_along_paths_equal_sums_over_ancestors(width, has_bias):
    ancestors = find_ancestors(build_segments(), 3)
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(len(ancestors), 140), torch.randn(140, 1, width), torch.randn(140)
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (rows, weight, bias)[: 2 + has_bias]]
    rows, weight, *optional = leaves
    out = convolve_paths(rows, weight, *(optional or [None]), PathTables.from_ancestors(ancestors, DEVICE))
    sources = np.concatenate([np.arange(len(ancestors))[:, None], ancestors], 1)
    padded = torch.cat([rows, rows.new_zeros(1, 140)])  # -1 is its last row
    expected = sum(padded[torch.from_numpy(sources[:, tap])] * weight[:, 0, width - 1 - tap] for tap in range(width))
    expected = expected + (optional[0] if optional else 0.0)
    gradient = torch.randn_like(out)
    results = [out, *torch.autograd.grad(out, leaves, gradient)]
    for actual, plain in zip(results, [expected, *torch.autograd.grad(expected, leaves, gradient)]):
        assert (actual - plain).norm() <= 1e-6 * plain.norm()


def test_rows_of_logits_may_have_impossible_tokens_and_no_target():
    from ramify.model.kernels.cuda.logits import reduce_logits

    logits = torch.zeros(2, 8192 + 4, device=DEVICE)
    logits[:, :8192] = -torch.inf
    columns = torch.tensor([8192, -1], device=DEVICE), torch.ones(2, device=DEVICE)
    logprob, _, logsumexp = reduce_logits(logits, *columns, LogitTransform())
    torch.testing.assert_close(logsumexp.cpu(), torch.tensor([4.0, 4.0]).log())
    torch.testing.assert_close(logprob.cpu(), torch.tensor([-math.log(4.0), math.nan]), equal_nan=True)


@pytest.mark.parametrize(("key_dim", "value_dim", "heads"), [(16, 16, 2), (24, 40, 4)])
def test_activate_heads_have_the_values_and_gradients_of_plain_formulas(key_dim, value_dim, heads):
    from ramify.model.kernels.cuda.activate_heads import activate_heads_op

    tokens, key_heads, eps = 19, 2, 1e-2
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    mixed = torch.randn(tokens, sum(widths), device=DEVICE, requires_grad=True)
    query, key, value = torch.nn.functional.silu(mixed.double()).split(widths, -1)
    query, key = (part.unflatten(1, (key_heads, key_dim)) for part in (query, key))
    query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + eps) for part in (query, key))
    expected = [query, key, value.unflatten(1, (heads, value_dim))]
    actual = activate_heads_op(mixed, key_heads, key_dim, value_dim, eps)
    for actual_part, part in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_part.double(), part, rtol=1e-5, atol=1e-6)
    grads = [torch.randn_like(part) for part in actual]
    (d_mixed,) = torch.autograd.grad(actual, mixed, grads)
    (exact,) = torch.autograd.grad(expected, mixed, [grad.double() for grad in grads])
    torch.testing.assert_close(d_mixed, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(1.7, 1.5)])
@pytest.mark.parametrize("vocab", [23, 8192 + 4096 + 1])
def test_rows_of_logits_have_the_numbers_and_gradients_of_float64(transform, vocab):
    from ramify.model.kernels.cuda.logits import differentiate_logits, reduce_logits

    rows, generator = 3, torch.Generator().manual_seed(vocab)
    product = (30 * torch.randn(rows, vocab, generator=generator)).requires_grad_()
    target_ids = torch.tensor([0, vocab - 1, 7])
    inv_temperature, grad = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([1.0, 0.0, -3.0])
    logprobs = (transform.apply(product.double()) * inv_temperature[:, None]).log_softmax(-1)
    expected = logprobs.gather(1, target_ids[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad(expected, product, grad.double(), retain_graph=True)
    arguments = product.detach().to(DEVICE), target_ids.to(DEVICE), inv_temperature.to(DEVICE)
    logprob, entropy, logsumexp = reduce_logits(*arguments, transform)
    gradient = differentiate_logits(*arguments, logsumexp, grad.to(DEVICE), transform)
    torch.testing.assert_close(logprob.cpu(), expected.float(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.cpu(), -(logprobs.exp() * logprobs).sum(-1).float(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["8bit", "4bit"])
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "dtype"),
    [
        (1, 66, 192, HALF_DTYPE),
        (16, 40, 640, torch.float32),
        (5, 9, 10, torch.float32),  # in blocks of two columns
        (129, 33, 128, HALF_DTYPE),
        (0, 33, 128, HALF_DTYPE),
        pytest.param(17, 129, 640, torch.float32, marks=long_in_the_interpreter),
        pytest.param(64, 128, 1024, HALF_DTYPE, marks=long_in_the_interpreter),
        pytest.param(65, 200, 128, HALF_DTYPE, marks=long_in_the_interpreter),
        pytest.param(128, 140, 256, HALF_DTYPE, marks=long_in_the_interpreter),
    ],
)
def test_quantized_products_equal_products_with_the_dequantized_matrix(rows, outputs, columns, dtype, mode):
    from ramify.model.kernels.cuda.quantized_products import dequantize, multiply

    torch.manual_seed(0)
    on_cpu = quantize_matrix(torch.randn(outputs, columns).to(dtype), mode)
    matrix, inputs = dequantize_matrix(on_cpu).to(DEVICE), torch.randn(rows, columns, device=DEVICE).to(dtype)
    quantized = QuantizedMatrix(*(part.to(DEVICE) for part in on_cpu))
    assert torch.equal(dequantize(quantized), matrix)
    expected = inputs.double() @ matrix.double().t()
    difference = (multiply(inputs, quantized).double() - expected).norm()
    assert difference <= (4 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps * expected.norm()


def test_matrices_are_dequantized_in_parts_for_many_rows(monkeypatch):
    from ramify.model.kernels.cuda import quantized_products

    monkeypatch.setattr(quantized_products, "DEQUANTIZED_PART_BYTES", 4 * 64 * 7)
    quantized = quantize_matrix(torch.randn(40, 64, device=DEVICE), "4bit")
    rows = torch.randn(150, 64, device=DEVICE)
    expected = rows @ quantized_products.dequantize(quantized).t()
    torch.testing.assert_close(quantized_products.multiply(rows, quantized), expected, rtol=1e-5, atol=1e-5)


def test_a_wrong_product_is_measured(monkeypatch):
    from ramify.model.kernels.cuda import quantized_products

    matrix = quantize_matrix(torch.randn(40, 64, device=DEVICE), "8bit")
    assert quantized_products.measure_error(matrix) < 1e-6
    monkeypatch.setattr(quantized_products, "dequantize", lambda part: dequantize_matrix(part).roll(1, 0))
    assert quantized_products.measure_error(matrix) > 0.5
    monkeypatch.setattr(quantized_products, "dequantize", lambda part: dequantize_matrix(part) * torch.nan)
    assert math.isnan(quantized_products.measure_error(matrix))  # of the last number of rows only


def test_products_with_matrices_of_every_shape_are_checked(monkeypatch):
    """Only the output projection of the second layer has this shape, and wrong products."""
    from ramify.model.kernels.cuda import quantized_products

    def roll_wide_products(rows: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
        return multiply(rows, matrix).roll(int(matrix.num_columns == 128), 1)

    def build_layer(width: int) -> LayerWeights:
        matrix, out = (quantize_matrix(torch.randn(8, columns, device=DEVICE), "4bit") for columns in (64, width))
        matrices = {"qkv": matrix, "out": out, "gate_up": matrix, "down": matrix}
        norms = dict.fromkeys(("norm", "mlp_norm"), torch.ones(64))
        return LayerWeights(**matrices, **norms, qkv_bias=None, q_norm=None, k_norm=None, out_bias=None)

    multiply = quantized_products.multiply
    monkeypatch.setattr(quantized_products, "multiply", roll_wide_products)
    _check_products([build_layer(64)])
    with pytest.raises(ModelUnsupported, match="8 x 128 differ by 1"):
        _check_products([build_layer(64), build_layer(128)])


@pytest.mark.parametrize(("heads", "kv_heads", "has_norm"), [(9, 3, True), (4, 2, False)])
def test_rotation_equals_plain_formulas(heads, kv_heads, has_norm):
    from ramify.model.kernels.cuda.decoder import HEADS_PER_PROGRAM, _rotate_and_cache

    torch.manual_seed(0)
    rows, width, num_heads = 5, 16, heads + 2 * kv_heads
    qkv, rope = torch.randn(rows, num_heads * width, device=DEVICE), torch.randn(20, 2 * width, device=DEVICE)
    bias, norms = torch.randn(num_heads * width, device=DEVICE), torch.randn(2, width, device=DEVICE)
    positions, slots = torch.tensor([[3, 4, 5, 0, 19], [7, 8, 9, 2, 1]], dtype=torch.int32, device=DEVICE)
    query, key, value = (qkv + bias).view(rows, num_heads, width).split([heads, kv_heads, kv_heads], 1)
    cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, -1)
    expected = []
    for part, norm in ((query, norms[0]), (key, norms[1])):
        normed = torch.nn.functional.rms_norm(part, (width,), norm, 1e-6) if has_norm else part
        expected.append(normed * cos + normed.roll(width // 2, -1) * sin)
    cache = torch.zeros(10, 2, kv_heads, width, device=DEVICE)
    constants: Any = {"HEADS": heads, "KV_HEADS": kv_heads, "D": width, "HALF": 8, "TILE": HEADS_PER_PROGRAM}
    constants |= {"ROTATED": width, "QUERY_STRIDE": width, "OFFSET": 0.0}
    _rotate_and_cache[(rows, -(-num_heads // HEADS_PER_PROGRAM))](
        qkv, bias, *norms, rope, positions, slots, cache, **constants, EPS=1e-6, HAS_BIAS=True, HAS_NORM=has_norm
    )
    torch.testing.assert_close(qkv.view(rows, num_heads, width)[:, :heads], expected[0])
    torch.testing.assert_close(cache[slots.long()], torch.stack((expected[1], value), 1))
    assert cache.abs().sum((1, 2, 3)).count_nonzero() == rows


def test_sampling_follows_the_cumulative_distribution():
    from ramify.model.kernels.cuda.sampling import gather_ids, sample_rows

    torch.manual_seed(0)
    rows, vocab = 6, 5000
    logits = 3 * torch.randn(rows, vocab, device=DEVICE)
    logits[::3, :4100] = -torch.inf  # as a grammar does: whole parts of the vocabulary
    temperatures = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0], device=DEVICE)
    seeds = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x123456789ABCDEF1)
    positions = torch.arange(100, 100 + 2 * rows, dtype=torch.int32, device=DEVICE)
    logit_rows = torch.arange(1, 2 * rows, 2, dtype=torch.int32, device=DEVICE)
    sampled = torch.zeros(rows + 2, 2, dtype=torch.int32, device=DEVICE)
    device_seeds = torch.from_numpy(seeds.view(np.int64)).to(DEVICE)
    sample_rows(logits, temperatures, device_seeds, positions, logit_rows, sampled)
    noise = uniform_noise(seeds.tolist(), [101 + 2 * row + 1 for row in range(rows)])
    for row in range(rows):
        temperature = temperatures[row].item() or 1.0
        logprobs = torch.log_softmax(logits[row].double() / temperature, -1)
        token = int(sampled[row, 0])
        if temperatures[row] == 0:
            assert token == logits[row].argmax()
        else:
            upper = logprobs.exp().cumsum(-1)
            below = upper[token - 1].item() if token else 0.0
            assert below - 1e-5 <= noise[row] <= upper[token].item() + 1e-5
        assert sampled[row, 1].view(torch.float32).item() == pytest.approx(logprobs[token].item(), abs=1e-4)
    ids, out = (
        torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE),
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
    )
    gather_ids(ids, torch.tensor([-1, 4, -1], dtype=torch.int32, device=DEVICE), sampled, out)
    assert out.tolist() == [7, sampled[4, 0].item(), 9]


@long_in_the_interpreter
def test_steps_of_a_small_engine_write_no_sampled_token_beyond_their_memory(tmp_path):
    from tests.support.models import build_core, run, write_llama

    core = build_core(write_llama(tmp_path / "model", 1), max_running_requests=1, device=DEVICE.type)
    runner: Any = core.runner
    memory = torch.full((64, 2), -7, dtype=torch.int32, device=DEVICE)
    size = len(runner._sampled)
    runner._sampled = memory[:size]
    run(core, core.create_request(list(range(3, 15)), SamplingParams(max_tokens=1)))  # 16 rows with padding
    assert (memory[size:] == -7).all()


@long_in_the_interpreter
def test_only_shapes_that_can_become_graphs_are_remembered(tmp_path, monkeypatch):
    """Other shapes have no padding, so with every mix of prompts there would be more of them."""
    from ramify.infer import cuda_runner
    from tests.support.models import build_core, run, write_llama

    monkeypatch.setattr(cuda_runner, "MAX_GRAPH_ROWS", 8)
    core = build_core(write_llama(tmp_path / "model", 1), max_running_requests=1, device=DEVICE.type)
    run(core, core.create_request(list(range(3, 15)), SamplingParams(max_tokens=2)))
    runner = core.runner
    assert isinstance(runner, CudaModelRunner)
    assert {shape.num_rows for shape in runner._seen} == {1}


@long_in_the_interpreter
@pytest.mark.parametrize("model_type", ["granite", "phi3", "seed_oss", "smollm3"])
def test_the_check_of_fused_families_passes_with_these_kernels(model_type, tmp_path):
    from ramify.model.load import load_engine_model
    from tests.support.models import FUSED, write_random_model

    directory = write_random_model(model_type, tmp_path, **FUSED[model_type])
    model = load_engine_model(directory, dtype="float32", device=DEVICE.type)
    fused = build_fused_model(model.module, planned=True)  # raises if the logits differ
    assert fused is not None and fused.ops.description == "Triton"


@long_in_the_interpreter
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2"])
def test_engine_with_these_kernels_has_the_logprobs_of_transformers(family, tmp_path, monkeypatch):
    """Requests share a prompt, fork inside a block, stop early, and are sampled greedily or with a filter."""
    from tests.support.models import HYBRIDS, build_core, reference, run, sampled_ids, scores, write_llama

    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", 8)
    source = {"llama": write_llama, **HYBRIDS}[family](tmp_path / "model", 1)
    core = build_core(
        source, kv_cache_tokens=400, max_running_requests=5, max_num_batched_tokens=16, device=DEVICE.type
    )
    assert isinstance(core.runner, CudaModelRunner) and core.runner.fused_model is not None
    prompt = [(7 * index + 3) % 90 for index in range(14)]
    sampling = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"stop_ids": frozenset(range(40))},
    ]
    requests = [
        core.create_request(prompt[: 14 - index], SamplingParams(max_tokens=3, seed=index, **params))
        for index, params in enumerate(sampling)
    ]
    run(core, *requests)
    model = reference(source)
    for request in requests:
        expected = scores(model, request.token_ids, request.sampling_params.temperature)
        first = len(request.prompt_token_ids)
        assert len(request.logprobs) == len(sampled_ids(request)) > 0 and request.num_pending == 0
        for index, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs)):
            assert abs(expected[first + index - 1, token].item() - logprob) < 1e-4
    assert core.counters.shared_keys > 0
    assert core.pool.num_free_blocks == core.pool.num_usable_blocks


@long_in_the_interpreter
def test_long_prompts_of_an_engine_continue_their_states_and_snapshots_in_chunks(tmp_path):
    """Parts of prompts share steps with decoding requests; the last request begins with the snapshot of another."""
    from tests.support.models import build_core, reference, run, sampled_ids, scores, write_qwen3_5

    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    source = write_qwen3_5(tmp_path / "model", 1, **layers, linear_num_key_heads=1, linear_num_value_heads=2)
    limits: Any = {"kv_cache_tokens": 800, "max_running_requests": 3, "max_num_batched_tokens": 96}
    core = build_core(source, **limits, device=DEVICE.type)
    assert isinstance(core.runner, CudaModelRunner) and core.runner.fused_model is not None
    prompts = [[(7 * index + first) % 90 + 3 for index in range(length)] for first, length in ((0, 20), (1, 150))]
    prompts.append([*prompts[1][:148], *range(5, 45)])
    params = SamplingParams(max_tokens=3, seed=1)
    requests = run(core, *(core.create_request(prompt, params) for prompt in prompts[:2]))
    requests += run(core, core.create_request(prompts[2], params))
    assert requests[2].num_cached_tokens == 148
    model, runner = reference(source), core.runner
    for request in requests:
        expected, first = scores(model, request.token_ids, 1.0), len(request.prompt_token_ids)
        for index, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs, strict=True), first - 1):
            assert abs(expected[index, token].item() - logprob) < 1e-4
    assert isinstance(runner, CudaModelRunner)
    assert {(shape.num_rows, shape.num_chunks) for shape in runner._seen if shape.num_chunks} == {
        (96, 3),
        (72, 2),
        (40, 1),
    }


@long_in_the_interpreter
def test_engine_notices_at_load_that_chunks_do_not_continue_a_state(tmp_path, monkeypatch):
    from ramify.model.kernels.cuda import recurrent_ops
    from tests.support.models import build_core, write_qwen3_5

    def start_from_zero(*arguments) -> None:
        *inputs, tracks, states, out, chunk_size, scale = arguments
        continue_tracks(*inputs, tracks - tracks.new_tensor([0, 0, 9]), states, out, chunk_size, scale)

    continue_tracks = recurrent_ops.continue_tracks
    monkeypatch.setattr(recurrent_ops, "continue_tracks", start_from_zero)
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    core = build_core(write_qwen3_5(tmp_path / "model", 1, **layers), kv_cache_tokens=64, device=DEVICE.type)
    assert core.runner.fused_model is None and "logits differ" in core.runner.ops_description


@long_in_the_interpreter
def test_engine_with_a_quantized_base_has_the_logprobs_of_the_rounded_weights(tmp_path):
    """Prompts have more rows than the kernel takes. The engine loads a version of the adapters."""
    from ramify.infer.config import EngineConfig
    from ramify.infer.engine_core import EngineCore
    from ramify.model.load import load_config, load_engine_model, load_hf_model
    from ramify.model.lora import add_engine_adapters, quantize_base
    from ramify.model.weights import get_untied_tensors, publish_weights, stage_weights
    from ramify.model.weights_manifest import PublishedAdapters
    from ramify.trace.version import PolicyVersion
    from tests.support.models import run, sampled_ids, scores, write_llama

    def add(module, device):
        add_engine_adapters(module, device, 4, 8, [], "4bit")
        if device.type == "cpu":  # where they are only rounded
            quantize_base(module, "4bit", torch.float32, device)

    source = write_llama(tmp_path / "model", 1, head_dim=16, hidden_size=64)
    model = load_engine_model(source, dtype="float32", device=DEVICE.type, add_adapters=add)
    config = EngineConfig(block_size=4, kv_cache_tokens=400, max_running_requests=4, max_num_batched_tokens=64)
    core = EngineCore(model, config, PolicyVersion("base"))
    assert core.runner.fused_model is not None and core.runner.fused_model.ops.description == "Triton"
    assert isinstance(core.runner.fused_model.weights.layers[0].qkv, QuantizedMatrix)
    tensors = {name: 0.1 * torch.randn_like(tensor) for name, tensor in get_untied_tensors(model.module).items()}
    adapters, version = PublishedAdapters(source, 8 / 4, "4bit"), PolicyVersion("p", 0, 1)
    directory = publish_weights(tmp_path / "version", tensors, version, base_model=source, adapters=adapters)
    core.swap_weights(stage_weights(directory, model.module), "recompute")
    prompt = [(7 * index + 3) % 90 for index in range(20)]
    requests = [core.create_request(prompt[seed:], SamplingParams(max_tokens=2, seed=seed)) for seed in range(2)]
    run(core, *requests)
    merged = load_hf_model(directory, load_config(directory), torch.float32, None)
    for request in requests:
        expected, first = scores(merged, request.token_ids, 1.0), len(request.prompt_token_ids)
        assert len(request.logprobs) == 2
        for index, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs)):
            assert abs(expected[first + index - 1, token].item() - logprob) < 1e-4
