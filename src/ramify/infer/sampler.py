"""Sampling: from logits to tokens, with one uniform number per token.

The number comes from a hash of (seed, position), so a request's tokens do not depend on what else is in the batch, on
when it was preempted, or on how often it was scheduled. The token is the one whose share of the cumulative distribution
holds the number. The sum runs in two stages, first over chunks of the vocabulary and then inside the selected chunk: a
full cumulative sum over every row would cost more than the softmax.

A logprob is `log softmax(logits / T)` over the whole vocabulary (T = 1 for greedy), with `logit_bias` applied and
before top-p, top-k and min-p, which only limit what may be sampled. With a grammar it is taken over the tokens that the
grammar allows.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from ramify.infer.grammar import mask_logits
from ramify.infer.request import EngineRequest, SamplingParams, TopLogprobs

DrawFn = Callable[[Tensor, list[float], list[int], list[int]], tuple[list[int], list[float]]]
"""(logits, temperatures, seeds, positions) -> tokens and logprobs, as `CompiledDecoderOps.sample_tokens`."""
VOCAB_CHUNK = 64  # tokens of the vocabulary that are summed at once
FILTERED_ROWS = 32  # rows that are sorted at once for top-k, top-p and min-p, at about 50 bytes per token
MAX_SINGLE_STAGE_VOCAB = 2048  # vocabularies up to this size are summed in one stage


def uniform_noise(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return one float64 in [0, 1) for each (seed, position), by the finalizer of SplitMix64 applied to both."""
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    mixed = _mix(_mix(seed) + position * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample_tokens(
    logits: Tensor, requests: Sequence[EngineRequest], draw: DrawFn | None = None
) -> tuple[list[int], list[float]]:
    """Return the next token of each request and its logprob. `logits` is [requests, vocab] of any float dtype.

    If `draw` is given, it samples all requests without filters, bias or top logprobs; the others use torch.
    """
    plain = [row for row, request in enumerate(requests) if request.is_plain] if draw else []
    if draw is None or not plain:
        return _sample_torch(logits, requests)
    if len(plain) == len(requests):
        seeds, positions = _seeds_and_positions(requests)
        return draw(logits, [request.sampling_params.temperature for request in requests], seeds, positions)
    tokens, logprobs = [0] * len(requests), [0.0] * len(requests)
    for rows in (plain, [row for row, request in enumerate(requests) if not request.is_plain]):
        sampled = sample_tokens(logits[rows], [requests[row] for row in rows], draw)
        for row, token, logprob in zip(rows, *sampled):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _sample_torch(logits: Tensor, requests: Sequence[EngineRequest]) -> tuple[list[int], list[float]]:
    scores = _scale_logits(logits, requests)
    max_score = scores.amax(-1, keepdim=True)
    weights = (scores - max_score).exp_()
    normalizer = weights.sum(-1, keepdim=True).log_().add_(max_score)
    filtered_rows = [row for row, request in enumerate(requests) if request.sampling_params.has_filters]
    for start in range(0, len(filtered_rows), FILTERED_ROWS):
        rows = filtered_rows[start : start + FILTERED_ROWS]
        params = [requests[row].sampling_params for row in rows]
        weights[rows] = _apply_top_k_top_p_min_p(weights[rows], params)
    greedy = [request.sampling_params.temperature == 0 for request in requests]
    if all(greedy):
        tokens = scores.argmax(-1)
    else:
        noise = uniform_noise(*_seeds_and_positions(requests))
        tokens = _sample_inverse_cdf(weights, torch.from_numpy(noise).to(scores.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), tokens)
    token_scores = scores.gather(-1, tokens.unsqueeze(-1))
    logprobs = (token_scores - normalizer).squeeze(-1)
    _record_top_logprobs(scores, normalizer, requests)
    return tokens.tolist(), logprobs.tolist()


def _seeds_and_positions(requests: Sequence[EngineRequest]) -> tuple[list[int], list[int]]:
    """Return seed and position of the next tokens: all that their noise depends on."""
    return [request.seed for request in requests], [len(request.token_ids) for request in requests]


def compute_top_logprobs(logits: Tensor, num_top: int) -> TopLogprobs:
    """Return the `num_top` likeliest tokens of each row, with the same logprobs as `compute_logprobs`."""
    if not num_top:
        return [[] for _ in range(len(logits))]
    scores = logits.float()
    values, tokens = (scores - scores.logsumexp(-1, keepdim=True)).topk(min(num_top, scores.shape[-1]))
    return [list(zip(*row)) for row in zip(tokens.tolist(), values.tolist())]


def _scale_logits(logits: Tensor, requests: Sequence[EngineRequest]) -> Tensor:
    """Return the biased logits over the temperature, in float32, as a copy; -inf for tokens that a grammar excludes."""
    scores = logits.to(torch.float32, copy=True)
    biases = [
        (row, token, bias) for row, request in enumerate(requests) for token, bias in request.sampling_params.logit_bias
    ]
    if biases:
        rows, tokens, values = (torch.tensor(column, device=scores.device) for column in zip(*biases))
        scores.index_put_((rows, tokens), values.float(), accumulate=True)
    temperatures = [request.sampling_params.temperature or 1.0 for request in requests]
    if any(temperature != 1.0 for temperature in temperatures):
        scores.div_(torch.tensor(temperatures, device=scores.device).unsqueeze(-1))
    grammars = [(row, request.grammar) for row, request in enumerate(requests) if request.grammar is not None]
    if grammars:
        mask_logits(scores, grammars)
    return scores


def _sample_inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row at `noise`."""
    rows, vocab = weights.shape
    if vocab <= MAX_SINGLE_STAGE_VOCAB:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _search_cumulative(cumulative, noise.unsqueeze(-1) * cumulative[:, -1:]).squeeze(-1)
    if vocab % VOCAB_CHUNK:
        weights = torch.nn.functional.pad(weights, (0, VOCAB_CHUNK - vocab % VOCAB_CHUNK))
    chunks = weights.view(rows, -1, VOCAB_CHUNK)
    chunk_sums = chunks.sum(-1)
    chunk_cumsum = chunk_sums.cumsum(-1, dtype=torch.float64)
    target = noise.unsqueeze(-1) * chunk_cumsum[:, -1:]
    chunk = _search_cumulative(chunk_cumsum, target)
    below = chunk_cumsum.gather(-1, chunk) - chunk_sums.gather(-1, chunk)
    chunk_weights = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, -1, VOCAB_CHUNK)).squeeze(1)
    remaining = (target - below).clamp_(min=0)  # rounding must not select a token of weight 0
    token = _search_cumulative(chunk_weights.cumsum(-1, dtype=torch.float64), remaining)
    return (chunk * VOCAB_CHUNK + token).squeeze(-1)


def _search_cumulative(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index in each row whose share of the cumulative sum holds `target`, [rows, 1].

    Sums round, so the target may be just beyond the last index with a positive weight; then that index is returned.
    """
    index = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(index, last).clamp_(max=cumulative.shape[-1] - 1)  # NaN is beyond every index


def _apply_top_k_top_p_min_p(weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return `weights` with 0 for tokens that top-k, top-p or min-p exclude. The likeliest token always stays."""
    vocab, device = weights.shape[1], weights.device
    top_k = torch.tensor([entry.top_k if entry.top_k > 0 else vocab for entry in params], device=device).unsqueeze(-1)
    top_p, min_p = torch.tensor([(entry.top_p, entry.min_p) for entry in params], device=device).unsqueeze(-1).unbind(1)
    values, order = weights.sort(descending=True, stable=True)
    keep = torch.arange(vocab, device=device) < top_k
    kept = values * keep
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    keep &= (cumulative - kept < top_p * cumulative[:, -1:]) | (top_p >= 1)
    keep &= values >= min_p * values[:, :1]
    keep[:, 0] = True  # whatever sums and products round to
    return torch.zeros_like(values).scatter_(1, order, values * keep)


def _record_top_logprobs(scores: Tensor, normalizer: Tensor, requests: Sequence[EngineRequest]) -> None:
    """Record the likeliest tokens for the requests that need them."""
    rows_by_count: dict[int, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        rows_by_count[request.sampling_params.top_logprobs].append(row)
    rows_by_count.pop(0, None)
    for count, rows in rows_by_count.items():  # among equal logprobs, `topk` of another count selects other tokens
        values, tokens = (scores[rows] - normalizer[rows]).topk(count)
        token_lists: list[list[int]] = tokens.tolist()
        value_lists: list[list[float]] = values.tolist()
        for row, row_tokens, row_values in zip(rows, token_lists, value_lists):
            pairs = zip(row_tokens, row_values)  # fewer than `count` if a grammar excludes all others
            requests[row].top_logprobs.append([(token, value) for token, value in pairs if value > -inf])
