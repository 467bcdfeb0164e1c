"""The initial weights of `tiny`: random, except for a few attention heads that already know where to look.

Copying takes two layers that work together: the first tells every position which characters came before it, and the
second looks for an earlier position with the same history and reads on from there. Either is useless without the other,
so training finds the pair late: from random weights it was not there after 250 steps of drills, from these after 50.

Heads of the first layer look one, two and three characters back by position alone: a constant query rotated against a
constant key gives scores that depend on the distance. Each head writes what it sees into its own subspace. Heads of the
second layer match queries with keys in those subspaces, using only the slow angles of the rotary embedding, because the
fast ones would distinguish near from far:

    copying     here, 1 back, 2 back   with the key's   1 back, 2 back, 3 back   reads the token there
    reversing   here, 1 back           with the key's   1 back, here             reads the token two before it

Training is free to change all of it. The output layer is the embedding times a rotation, so that a position does not
begin by predicting its own character.
"""

import math
from typing import Any

import torch
from torch import Tensor

NUM_COPY_HEADS, NUM_REVERSE_HEADS = 4, 1  # of the second layer
LOOKBACK = 3  # characters
CONSTANT_FEATURE = 4.0  # the first number of every embedding, relative to the spread of the others
SCORE_MARGIN = 6.0  # how much the right distance scores above the next one
MAX_SLOW_ANGLE = 0.02  # radians per token
# Scales of weights, found by trying; OTHERS_SCALE is for the heads that are not set here.
WRITE_SCALE, MATCH_SCALE, READ_SCALE, OTHERS_SCALE = 0.1, 1.6, 2.0, 0.1


@torch.no_grad()
def init_induction_heads(model: Any, seed: int) -> None:
    """Set the heads of a `LlamaForCausalLM` with random weights (Any: stubs lose the types of its layers)."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    head_dim, width = int(config.head_dim), int(config.hidden_size)
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    slow_dims = torch.nonzero((angles < MAX_SLOW_ANGLE).repeat(2)).flatten()

    def random_orthonormal_rows(rows: int, columns: int = width) -> Tensor:
        return torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T.contiguous()

    def random_projection() -> Tensor:
        """Return a projection to a head that ignores the constant feature."""
        return random_orthonormal_rows(head_dim).index_fill(1, torch.tensor([0]), 0.0)

    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = CONSTANT_FEATURE * config.initializer_range
    rotation = random_orthonormal_rows(width)
    model.lm_head.weight.copy_(embedding.index_fill(1, torch.tensor([0]), 0.0) @ rotation.T)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(OTHERS_SCALE)
        layer.mlp.down_proj.weight.mul_(OTHERS_SCALE)

    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    normed_constant = embedding[:, 0].mean() / embedding.square().mean(-1).sqrt().mean()
    scale = (SCORE_MARGIN * math.sqrt(head_dim) / (1 - angles.cos()).sum()).sqrt() / normed_constant
    here, past = random_projection(), [random_projection() for _ in range(LOOKBACK)]
    for head in range(LOOKBACK):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        for projection, distance in ((first.q_proj, 0), (first.k_proj, head + 1)):
            projection.weight[rows] *= OTHERS_SCALE
            projection.weight[rows, 0] = scale * torch.cat([(distance * angles).cos(), (distance * angles).sin()])
        first.v_proj.weight[rows] = here
        first.o_proj.weight[:, rows] = WRITE_SCALE * past[head].T

    for head in range(NUM_COPY_HEADS + NUM_REVERSE_HEADS):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        if head < NUM_COPY_HEADS:
            read = written = random_projection()
            pairs = list(zip([here, *past], past))
        else:
            read, written = past[1], here
            pairs = [(here, past[0]), (past[0], here)]
        second.q_proj.weight[rows] = 0.0
        second.k_proj.weight[rows] = 0.0
        for query, key in pairs:
            matching = MATCH_SCALE * random_orthonormal_rows(len(slow_dims), head_dim)
            second.q_proj.weight[rows].index_add_(0, slow_dims, matching @ query)
            second.k_proj.weight[rows].index_add_(0, slow_dims, matching @ key)
        second.v_proj.weight[rows] = read
        second.o_proj.weight[:, rows] = READ_SCALE * rotation @ written.T
