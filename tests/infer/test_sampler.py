"""Sampling from given logits: no request depends on the others of its batch."""

import torch

from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import FILTERED_ROWS, sample_tokens


def test_top_logprobs_among_equal_ones_do_not_depend_on_the_batch():
    logits = torch.randint(8, (3, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = (1, 5, 20)
    together = [EngineRequest([3], SamplingParams(top_logprobs=count), 1) for count in counts]
    sample_tokens(logits, together)
    for row, (count, request) in enumerate(zip(counts, together)):
        alone = EngineRequest([3], SamplingParams(top_logprobs=count), 1)
        sample_tokens(logits[row : row + 1], [alone])
        assert request.top_logprobs == alone.top_logprobs
        assert len(request.top_logprobs[0]) == count


def test_filters_apply_to_more_rows_than_are_sorted_at_once():
    rows = 2 * FILTERED_ROWS + 3
    logits = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_k=1, seed=row) if row % 3 else SamplingParams(seed=row) for row in range(rows)]
    tokens, _ = sample_tokens(logits, [EngineRequest([3], entry, 1) for entry in params])
    likeliest = logits.argmax(-1).tolist()
    assert all(tokens[row] == likeliest[row] for row in range(rows) if row % 3)
    assert any(tokens[row] != likeliest[row] for row in range(0, rows, 3))
