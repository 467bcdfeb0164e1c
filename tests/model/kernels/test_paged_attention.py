"""Attention to the paged cache in PyTorch has the precision of its result, also with sinks and soft caps."""

import pytest
import torch

from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile, KVPool, write_kv

KEYS, KV_HEADS, HEADS, WIDTH = 200, 2, 4, 64


@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, True), (50.0, False), (50.0, True)])
def test_scores_of_bfloat16_are_computed_in_float32(softcap, has_sinks):
    torch.manual_seed(0)
    query = (4 * torch.randn(2, HEADS, WIDTH)).bfloat16()
    key, value = torch.randn(2, KEYS, KV_HEADS, WIDTH).bfloat16()
    sinks = torch.randn(HEADS) if has_sinks else None
    pool = KVPool(1, 1, KEYS, KV_HEADS, WIDTH, torch.bfloat16, "cpu")
    positions = torch.arange(KEYS - 2, KEYS)
    tile = AttentionTile(0, 2, 1, 2, torch.zeros(1, dtype=torch.long), positions[None])
    write_kv(AttentionMetadata(pool, torch.arange(KEYS)), 0, torch.stack([key, value], 1).flatten(1))
    out = AttentionMetadata(pool, positions, [tile]).attend(query, 0, None, softcap=softcap, sinks=sinks)

    keys, values = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * WIDTH**-0.5
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(torch.arange(KEYS) > positions[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, 2, -1)], -1)
    exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :KEYS], values)
    rounded = exact.to(torch.bfloat16)
    assert (out.double() - exact).norm() <= 1.7 * (rounded.double() - exact).norm()
