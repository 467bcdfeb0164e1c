"""What recurrent layers read of a pack: its chunks and the ancestors of its tokens, built once for all layers.

CPU     chunks by depth, plain PyTorch     ramify.model.delta_rule
CUDA    chunks by track, Triton            ramify.model.kernels.cuda.delta_rule, path_convolution
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.delta_rule import ChunkBatch, gated_delta_rule
from ramify.model.device_copy import copy_to_device
from ramify.model.forest_chunks import ChunkTracks, ForestChunks, ForestSegments, find_ancestors
from ramify.model.kernels.chunk_plan import CHUNK_SIZE, round_up_width
from ramify.model.pack_layout import MAX_CONV_WIDTH
from ramify.trace import Forest
from ramify.trace.columns import Int32Array

MIN_ROWS = 2  # of a table, because compiled code would be specialized to one


class TrackTables(NamedTuple):
    """The chunks and tracks of a pack, as `gated_delta_rule_op` reads them."""

    rows: Tensor  # [rows] the token of each row
    output_rows: Tensor  # [tokens] the first row of each token
    token_rows: Tensor  # [rows] the rows of each token
    first_rows: Tensor  # [tokens + 1] where they begin
    chunks: Tensor  # [chunks, 3] start, stop, fork
    track_chunks: Tensor  # [chunks]
    tracks: Tensor  # [tracks, 3] first and last + 1 of its chunks, fork
    fork_tracks: Tensor  # [forks + 1]
    rounds: Tensor  # [rounds + 1], on the CPU

    @classmethod
    def from_chunks(cls, chunks: ForestChunks, device: torch.device) -> "TrackTables":
        """Join chunks to tracks. Rows that are added to short tables name no token and no chunk."""
        tracks, (token_rows, first_rows) = ChunkTracks.from_chunks(chunks), chunks.group_rows()
        arrays = (
            chunks.rows,
            token_rows[first_rows[:-1]],
            token_rows,
            first_rows,
            _pad_rows(np.stack([chunks.start, chunks.stop, tracks.fork_of_chunk], 1), (0, 0, -1)),
            _pad_rows(tracks.chunk, 0),
            _pad_rows(np.stack([tracks.first[:-1], tracks.first[1:], tracks.fork], 1), (0, 0, -1)),
            _pad_rows(tracks.fork_first, len(tracks.fork)),
        )
        rounds = torch.from_numpy(_pad_rows(tracks.round_first, len(tracks.fork)))
        tables = cls(*copy_to_device(arrays, device), rounds=rounds)
        _mark_dynamic(tables)
        return tables


class PathTables(NamedTuple):
    """The ancestors of each token, as `path_convolution_op` reads them."""

    ancestors: Tensor  # [tokens, MAX_CONV_WIDTH - 1]
    fork_rows: Tensor  # [tokens before forks, 3] the token, and the first and last + 1 of its readers
    readers: Tensor  # [entries, 2] a token that reads, and the distance

    @classmethod
    def from_ancestors(cls, ancestors: Int32Array, device: torch.device) -> "PathTables":
        """List the readers of each token that is read by others than its next tokens."""
        tokens = np.arange(len(ancestors), dtype=np.int32)
        distances = np.arange(ancestors.shape[1] + 1, dtype=np.int32)[:, None]
        sources = np.concatenate([tokens[None], ancestors.T])  # [distances, tokens]: numpy is faster with long rows
        is_fork_row = np.zeros(len(tokens) + 1, bool)
        is_fork_row[sources[(sources >= 0) & (sources != tokens - distances)]] = True
        entries = np.flatnonzero(is_fork_row[sources] & (sources >= 0))
        source, (distance, reader) = sources.flat[entries], np.divmod(entries, max(1, len(tokens)))
        order = np.lexsort((distance, reader, source))
        fork_rows = np.flatnonzero(is_fork_row)
        bounds = np.searchsorted(source[order], np.append(fork_rows, len(tokens)))
        arrays = (
            ancestors,
            _pad_rows(np.stack([fork_rows, bounds[:-1], bounds[1:]], 1), (-1, 0, 0)),
            _pad_rows(np.stack([reader, distance], 1)[order], (0, 0)),
        )
        tables = cls(*copy_to_device([np.ascontiguousarray(array, np.int32) for array in arrays], device))
        _mark_dynamic(tables)
        return tables


class ForestRecurrence:
    """The path of each token of a pack, as recurrent layers follow it."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        segments = ForestSegments.from_forest(forest)
        chunks = ForestChunks.from_segments(segments, CHUNK_SIZE)
        ancestors = find_ancestors(segments, MAX_CONV_WIDTH - 1)
        self.uses_kernels = device.type == "cuda"
        if self.uses_kernels:
            self.tracks, self.paths = (
                TrackTables.from_chunks(chunks, device),
                PathTables.from_ancestors(ancestors, device),
            )
        else:
            self.ancestors, self.chunks = torch.from_numpy(ancestors).long(), ChunkBatch.from_chunks(chunks)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `rows` [tokens, channels] along the paths; `weight` is [channels, 1, width]."""
        if self.uses_kernels:
            return convolve_paths(rows, weight, bias, self.paths)
        taps = weight.squeeze(1).flip(1).unbind(1)  # of the token itself, the token before it, ...
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        out = rows * taps[0]
        for tap, index in zip(taps[1:], self.ancestors.unbind(1)):
            out = out + padded.index_select(0, index % len(padded)) * tap
        return out if bias is None else out + bias

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        strength: Tensor | None,
        scale: float | None = None,
    ) -> Tensor:
        """Return the output of `ramify.model.delta_rule.gated_delta_rule` for each token."""
        inputs = query, key, value, log_decay, strength
        if self.uses_kernels:
            return pass_tracks(*inputs, self.tracks, scale)
        return gated_delta_rule(*inputs, self.chunks, scale)


def convolve_paths(rows: Tensor, weight: Tensor, bias: Tensor | None, paths: PathTables) -> Tensor:
    """Return the convolution by the Triton kernels."""
    from ramify.model.kernels.cuda.path_convolution import path_convolution_op  # needs Triton

    return path_convolution_op(rows.contiguous(), weight.squeeze(1), bias, *paths)


def pass_tracks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor | None,
    tracks: TrackTables,
    scale: float | None = None,
) -> Tensor:
    """Return the gated delta rule by the Triton kernels, which need widths of powers of two, at least 64."""
    from ramify.model.kernels.cuda.delta_rule import gated_delta_rule_op  # needs Triton

    scale, width = query.shape[-1] ** -0.5 if scale is None else scale, value.shape[-1]
    inputs = [_pad_width(tensor, round_up_width(tensor.shape[-1])).contiguous() for tensor in (query, key, value)]
    scalars = (tensor if tensor is None else tensor.float().contiguous() for tensor in (log_decay, strength))
    out, _, _ = gated_delta_rule_op(*inputs, *scalars, *tracks, CHUNK_SIZE, scale)
    return out if out.shape[-1] == width else out[..., :width]


def measure_kernel_error(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_correction: bool = True,
) -> float:
    """Return the largest relative error of the Triton kernels' output and gradients. One of two trees repeats tokens.

    The reference is PyTorch in float64. Without the correction of the delta rule, it is gated linear attention.
    """
    stop, parent = np.array([6, 9, 14, 17], np.int32) + CHUNK_SIZE, np.array([-1, 0, 0, -1], np.int32)
    segments = ForestSegments(np.append(np.int32(0), stop[:-1]), stop, parent)
    chunks, generator = ForestChunks.from_segments(segments, CHUNK_SIZE), torch.Generator().manual_seed(0)
    shapes = [(key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), (heads, value_dim), (heads,), (heads,)]
    query, key, value, gradient, decay, strength = (
        torch.randn(int(stop[-1]), *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    vectors = [F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, gradient]
    *vectors, gradient = (tensor.to(dtype) for tensor in vectors)
    rates = torch.tensor([0.25, 100.0]).repeat(heads)[:heads]  # of forgetting: a fast one is infinite backwards
    results: list[list[Tensor]] = []
    for place, wide in ((device, None), (torch.device("cpu"), torch.float64)):
        inputs = [tensor.to(place, wide or dtype).requires_grad_() for tensor in vectors]
        scalars = [-decay.abs() * rates, *([strength.sigmoid()] if has_correction else [])]
        inputs += [tensor.to(place, wide or torch.float32).requires_grad_() for tensor in scalars]
        optional = inputs[4] if has_correction else None
        with torch.enable_grad():
            if wide is None:
                out = pass_tracks(*inputs[:4], strength=optional, tracks=TrackTables.from_chunks(chunks, place))
            else:
                out = gated_delta_rule(*inputs[:4], optional, ChunkBatch.from_chunks(chunks))
            results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient.to(out))])
    errors = [(actual.cpu() - exact).norm() / exact.norm() for actual, exact in zip(*results)]
    return float(torch.stack(errors).max())  # unlike Python's, it keeps NaN


def _pad_width(tensor: Tensor, width: int) -> Tensor:
    return F.pad(tensor, (0, width - tensor.shape[-1])) if width > tensor.shape[-1] else tensor


def _pad_rows(table: np.ndarray, row: object) -> np.ndarray:
    """Append `row` until a table has `MIN_ROWS` rows."""
    missing = max(0, MIN_ROWS - len(table))
    return np.concatenate([table, np.broadcast_to(np.asarray(row), (missing, *table.shape[1:]))]).astype(np.int32)


def _mark_dynamic(tables: tuple[Tensor, ...]) -> None:
    """Let compiled layers serve tables of all lengths."""
    for table in tables:
        torch._dynamo.maybe_mark_dynamic(table, 0)
