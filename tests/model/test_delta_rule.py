"""The gated delta rule and gated linear attention over a forest are the recurrences of transformers along each path."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from ramify.model.delta_rule import ChunkBatch, gated_delta_rule
from ramify.model.forest_chunks import ForestChunks, ForestSegments

LENGTHS, PARENTS = [70, 3, 40, 1, 9, 130, 5], [-1, 0, 1, 1, 0, -1, 5]  # of segments: two trees
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


def build_segments(lengths: list[int], parents: list[int]) -> ForestSegments:
    stop = np.cumsum(lengths)
    arrays = (stop - lengths, stop, parents)
    return ForestSegments(*(np.array(array, np.int32) for array in arrays))


def build_inputs(num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Return queries, keys, values, log decays and strengths."""
    torch.manual_seed(0)
    query, key = (torch.randn(num_tokens, KEY_HEADS, KEY_DIM, dtype=torch.float64) for _ in range(2))
    inputs = [
        query / query.norm(dim=-1, keepdim=True),
        key / key.norm(dim=-1, keepdim=True),
        torch.randn(num_tokens, HEADS, VALUE_DIM, dtype=torch.float64),
        -torch.rand(num_tokens, HEADS, dtype=torch.float64) / 4,
        torch.rand(num_tokens, HEADS, dtype=torch.float64),
    ]
    return [tensor.to(device, dtype).requires_grad_() for tensor in inputs]


def list_leaf_paths(segments: ForestSegments) -> list[Tensor]:
    """Return the tokens of each path from a root to a leaf."""
    paths: list[np.ndarray] = []
    for start, stop, parent in zip(segments.start, segments.stop, segments.parent):
        own = np.arange(start, stop)
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
    leaves = set(range(len(segments))) - set(segments.parent.tolist())
    return [torch.from_numpy(paths[leaf]) for leaf in sorted(leaves)]


def gated_delta_step(
    query: Tensor,  # [sequences, key_heads, key_dim], normalized
    key: Tensor,  # the same
    value: Tensor,  # [sequences, heads, value_dim]
    log_decay: Tensor,  # [sequences, heads]
    strength: Tensor | None,  # [sequences, heads]; None for gated linear attention
    state: Tensor,  # [sequences, heads, key_dim, value_dim]
    scale: float = KEY_DIM**-0.5,
) -> tuple[Tensor, Tensor]:
    """Return the output of one token of each sequence, [sequences, heads, value_dim], and the state after it."""
    repeats = value.shape[1] // key.shape[1]
    q, k = (tensor.to(state.dtype).repeat_interleave(repeats, 1).unsqueeze(-1) for tensor in (query, key))
    decayed = state * log_decay.to(state.dtype).exp()[..., None, None]
    added = value.to(state.dtype)
    if strength is not None:
        added = (added - (decayed * k).sum(-2)) * strength.to(state.dtype).unsqueeze(-1)
    state = decayed + k * added.unsqueeze(-2)
    return (state * q).sum(-2).mul(scale).to(value.dtype), state


def compute_by_paths(segments: ForestSegments, inputs: list[Tensor], has_correction: bool = True) -> Tensor:
    """Return the output of each token, by the recurrence in float64. Linear attention does not scale its queries."""
    value = inputs[2]
    out = torch.zeros_like(value)
    is_done = torch.zeros(len(value), dtype=torch.bool)
    for path in list_leaf_paths(segments):
        state = value.new_zeros(1, HEADS, KEY_DIM, VALUE_DIM)
        rows = []
        for token in path.tolist():
            token_inputs = [tensor[token][None] for tensor in inputs]
            if has_correction:
                row, state = gated_delta_step(*token_inputs, state)
            else:
                row, state = gated_delta_step(*token_inputs[:4], None, state, scale=1.0)
            rows.append(row)
        new = ~is_done[path]
        out = out.index_put((path[new],), torch.cat(rows)[new])
        is_done[path] = True
    return out


@cache
def compute_exact(has_correction: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the output of the recurrence, a gradient of this output, and the gradients of its inputs."""
    segments = build_segments(LENGTHS, PARENTS)
    inputs = build_inputs(sum(LENGTHS), torch.float64)[: 5 if has_correction else 4]
    exact = compute_by_paths(segments, inputs, has_correction)
    gradient = torch.randn_like(exact)
    return exact.detach(), gradient, torch.autograd.grad(exact, inputs, gradient)


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
def test_a_forest_has_the_outputs_and_gradients_of_its_paths(size, dtype, tolerance):
    inputs = build_inputs(sum(LENGTHS), dtype)
    batch = ChunkBatch.from_chunks(ForestChunks.from_segments(build_segments(LENGTHS, PARENTS), size))
    out = gated_delta_rule(*inputs, batch)
    assert out.dtype == dtype
    check_outputs_and_gradients(out, inputs, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
def test_without_strengths_a_forest_has_the_linear_attention_of_its_paths(dtype, tolerance):
    inputs = build_inputs(sum(LENGTHS), dtype)[:4]
    batch = ChunkBatch.from_chunks(ForestChunks.from_segments(build_segments(LENGTHS, PARENTS), 64))
    out = gated_delta_rule(*inputs, None, batch, scale=1.0)
    check_outputs_and_gradients(out, inputs, tolerance)


def check_outputs_and_gradients(out: Tensor, inputs: Sequence[Tensor], tolerance: float) -> None:
    exact, gradient, exact_gradients = compute_exact(has_correction=len(inputs) == 5)
    gradients = torch.autograd.grad(out, inputs, gradient.to(out.dtype))
    for actual, expected in zip([out, *gradients], [exact, *exact_gradients]):
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_a_forest_is_rounded_like_its_paths():
    """Also after forks within a chunk, and within another chunk that has begun before the fork."""
    lengths, parents = [90, 70, 65, 5, 80], [-1, 0, 0, 2, 2]
    segments = build_segments(lengths, parents)
    inputs = [tensor.detach() for tensor in build_inputs(sum(lengths), torch.float32)]
    out = gated_delta_rule(*inputs, ChunkBatch.from_chunks(ForestChunks.from_segments(segments, 64)))
    for path in list_leaf_paths(segments):
        chain = ForestChunks.from_segments(build_segments([len(path)], [-1]), 64)
        assert torch.equal(out[path], gated_delta_rule(*(t[path] for t in inputs), ChunkBatch.from_chunks(chain)))


def test_only_the_result_of_bfloat16_inputs_is_rounded():
    segments = build_segments(LENGTHS, PARENTS)
    inputs = [tensor.detach() for tensor in build_inputs(sum(LENGTHS), torch.bfloat16)]
    out = gated_delta_rule(*inputs, ChunkBatch.from_chunks(ForestChunks.from_segments(segments, 64)))
    exact = compute_by_paths(segments, [tensor.double() for tensor in inputs])
    rounded = exact.to(torch.bfloat16)
    assert (out.double() - exact).norm() <= 1.01 * (rounded.double() - exact).norm()


def test_a_step_is_a_step_of_transformers():
    query, key, value, log_decay, strength = (tensor.detach() for tensor in build_inputs(9, torch.float32))
    repeated = [tensor.repeat_interleave(HEADS // KEY_HEADS, 1)[None] for tensor in (query, key)]
    expected, last = torch_recurrent_gated_delta_rule(
        *repeated, value[None], g=log_decay[None], beta=strength[None], output_final_state=True
    )
    state, rows = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM), []
    for start, stop in pairwise(range(10)):
        row, state = gated_delta_step(*(t[start:stop] for t in (query, key, value, log_decay, strength)), state)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows), expected[0])
    torch.testing.assert_close(state, last)


def test_linear_attention_is_the_scan_of_mamba2_in_transformers():
    query, key, value, log_rate, step_size = (tensor.detach() for tensor in build_inputs(150, torch.float32))
    rate = log_rate[0].exp()
    groups = [tensor[None] for tensor in (key, query)]
    expected = mamba2_chunk_scan(value[None], step_size[None], -rate, *groups, chunk_size=32)
    batch = ChunkBatch.from_chunks(ForestChunks.from_segments(build_segments([150], [-1]), 64))
    inputs = query, key, value * step_size.unsqueeze(-1), -rate * step_size
    torch.testing.assert_close(gated_delta_rule(*inputs, None, batch, scale=1.0), expected[0])


def test_hundreds_of_levels_are_computed():
    levels = 250
    lengths, parents = [3] * (2 * levels), [-1] + [2 * ((index - 1) // 2) for index in range(1, 2 * levels)]
    segments = build_segments(lengths, parents)
    inputs = [tensor.detach() for tensor in build_inputs(sum(lengths), torch.float64)]
    out = gated_delta_rule(*inputs, ChunkBatch.from_chunks(ForestChunks.from_segments(segments, 64)))
    path = list_leaf_paths(segments)[-1]
    chain = build_segments([len(path)], [-1])
    alone = gated_delta_rule(*(t[path] for t in inputs), ChunkBatch.from_chunks(ForestChunks.from_segments(chain, 64)))
    torch.testing.assert_close(out[path], alone)
