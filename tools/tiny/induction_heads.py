"""Where `tiny` starts: random weights, but for a few heads that already know where to look.

To copy takes two layers that agree: the first tells every place which characters came before it, the second looks for
the place that was reached in the same way, and reads on from there. Either is useless without the other, so training
finds the pair late: from random weights it was not there after 250 steps of drills, from these it is after 50.

The first layer looks one, two and three characters back by position alone: a constant query turned against a constant
key gives scores that depend on the distance. Each head writes what it sees into a subspace of its own. Heads of the
second layer match queries with keys in those subspaces, with the slow turns of the rotary embedding only, since the
fast ones would tell near from far:

    copying     here, 1 back, 2 back   with the key's   1 back, 2 back, 3 back   reads what is there
    reversing   here, 1 back           with the key's   1 back, here             reads what is two before it

Training is free to change all of it. The output layer is the embedding turned by a rotation, so that a place does not
begin by predicting its own character.
"""

import math
from typing import Any

import torch
from torch import Tensor

NUM_COPY_HEADS, NUM_REVERSE_HEADS = 4, 1  # heads of the second layer
LOOKBACK = 3  # characters
CONSTANT_FEATURE = 4.0  # the first number of every embedding, against the spread of the others
SCORE_MARGIN = 6.0  # by how much the wanted distance scores above the next one
MAX_SLOW_ANGLE = 0.02  # radians per token
WRITE_SCALE, MATCH_SCALE, READ_SCALE, OTHERS_SCALE = (
    0.1,
    1.6,
    2.0,
    0.1,
)  # sizes of the weights, tried out; others are those of the other heads


@torch.no_grad()
def init_induction_heads(model: Any, seed: int) -> None:
    """Set up the heads of a `LlamaForCausalLM` (Any: stubs lose the types of its layers) with random weights."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    size, width = int(config.head_dim), int(config.hidden_size)
    turns = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))
    slow = torch.nonzero((turns < MAX_SLOW_ANGLE).repeat(2)).flatten()

    def random_orthonormal_rows(rows: int, columns: int = width) -> Tensor:
        """Random orthonormal rows."""
        return torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T.contiguous()

    def random_projection() -> Tensor:
        """The same, blind to the constant."""
        return random_orthonormal_rows(size).index_fill(1, torch.tensor([0]), 0.0)

    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = CONSTANT_FEATURE * config.initializer_range
    rotation = random_orthonormal_rows(width)
    model.lm_head.weight.copy_(embedding.index_fill(1, torch.tensor([0]), 0.0) @ rotation.T)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(OTHERS_SCALE)
        layer.mlp.down_proj.weight.mul_(OTHERS_SCALE)

    first, second = (model.model.layers[at].self_attn for at in (0, 1))
    seen = embedding[:, 0].mean() / embedding.square().mean(-1).sqrt().mean()
    scale = (SCORE_MARGIN * math.sqrt(size) / (1 - turns.cos()).sum()).sqrt() / seen
    here, past = random_projection(), [random_projection() for _ in range(LOOKBACK)]
    for head in range(LOOKBACK):
        rows = slice(head * size, (head + 1) * size)
        for projection, distance in ((first.q_proj, 0), (first.k_proj, head + 1)):
            projection.weight[rows] *= OTHERS_SCALE
            projection.weight[rows, 0] = scale * torch.cat([(distance * turns).cos(), (distance * turns).sin()])
        first.v_proj.weight[rows] = here
        first.o_proj.weight[:, rows] = WRITE_SCALE * past[head].T

    for head in range(NUM_COPY_HEADS + NUM_REVERSE_HEADS):
        rows = slice(head * size, (head + 1) * size)
        if head < NUM_COPY_HEADS:
            read = written = random_projection()
            pairs = list(zip([here, *past], past))
        else:
            read, written = past[1], here
            pairs = [(here, past[0]), (past[0], here)]
        second.q_proj.weight[rows] = 0.0
        second.k_proj.weight[rows] = 0.0
        for query, key in pairs:
            shared = MATCH_SCALE * random_orthonormal_rows(len(slow), size)
            second.q_proj.weight[rows].index_add_(0, slow, shared @ query)
            second.k_proj.weight[rows].index_add_(0, slow, shared @ key)
        second.v_proj.weight[rows] = read
        second.o_proj.weight[:, rows] = READ_SCALE * rotation @ written.T
