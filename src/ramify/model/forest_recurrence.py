"""What recurrent layers read of a pack: its chunks and the ancestors of its tokens, built once for all layers.

CPU     chunks by depth, plain PyTorch     ramify.model.delta_rule
CUDA    chunks by track, Triton            ramify.model.kernels.cuda.delta_rule
"""

import torch
from torch import Tensor

from ramify.model.delta_rule import ChunkBatch, gated_delta_rule
from ramify.model.forest_chunks import ForestChunks, find_ancestors
from ramify.model.forest_segments import ForestSegments
from ramify.model.pack_layout import MAX_CONV_WIDTH
from ramify.trace import Forest

CHUNK_SIZE = 64  # tokens


class ForestRecurrence:
    """The path of each token of a pack, as recurrent layers follow it."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        segments = ForestSegments.from_forest(forest)
        chunks = ForestChunks.from_segments(segments, CHUNK_SIZE)
        ancestors = find_ancestors(segments, MAX_CONV_WIDTH - 1)
        self.ancestors = torch.from_numpy(ancestors).long().to(device)
        self.chunks = ChunkBatch.from_chunks(chunks).to(device)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `rows` [tokens, channels] along the paths; `weight` is [channels, 1, width]."""
        taps = weight.squeeze(1).flip(1).unbind(1)  # of the token itself, the token before it, ...
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        out = rows * taps[0]
        for tap, index in zip(taps[1:], self.ancestors.unbind(1)):
            out = out + padded.index_select(0, index % len(padded)) * tap
        return out if bias is None else out + bias

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor
    ) -> Tensor:
        """Return the output of `ramify.model.delta_rule.gated_delta_rule` for each token."""
        return gated_delta_rule(query, key, value, log_decay, strength, self.chunks)  # pyright: ignore[reportCallIssue]
