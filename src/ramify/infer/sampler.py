"""From logits to tokens, one uniform number per token.

The number comes from a hash of (seed, position), so a request's tokens do not depend on what runs beside it, on when it
was preempted, or on how often it was scheduled. The token is the one whose share of the cumulative distribution holds
the number. The sum runs in two stages, first over groups of the vocabulary and then inside the group that was hit: a
full cumulative sum over every row would cost more than the softmax.

A logprob is `log softmax(logits / T)` over the whole vocabulary (T = 1 for greedy), with `logit_bias` applied and
before top-p, top-k and min-p, which only narrow what may be drawn.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.infer.request import EngineRequest

DrawFn = Callable[[Tensor, list[float], list[int], list[int]], tuple[list[int], list[float]]]
VOCAB_CHUNK = 64  # tokens of the vocabulary summed at once
MAX_SINGLE_STAGE_VOCAB = 2048  # vocabularies up to this size are summed in one stage


def uniform_noise(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position), by the finalizer of SplitMix64 applied to both."""
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
    """The next token of each request and its logprob. `logits` is [requests, vocab] of any float type.

    With `draw` the requests that take the distribution as it is are answered by it, whoever else is in the batch.
    """
    plain = [row for row, request in enumerate(requests) if request.is_plain] if draw else []
    if draw is None or not plain:
        return _sample_torch(logits, requests)
    if len(plain) == len(requests):
        seeds, positions = _seeds_and_positions(requests)
        return draw(logits, [request.sampling_params.temperature for request in requests], seeds, positions)
    tokens, logprobs = [0] * len(requests), [0.0] * len(requests)
    for rows in (plain, [row for row, request in enumerate(requests) if not request.is_plain]):
        part = sample_tokens(logits[rows], [requests[row] for row in rows], draw)
        for row, token, logprob in zip(rows, *part):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _sample_torch(logits: Tensor, requests: Sequence[EngineRequest]) -> tuple[list[int], list[float]]:
    scores = _scale_logits(logits, requests)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    normalizer = weights.sum(-1, keepdim=True).log_().add_(peak)
    filtered = [row for row, request in enumerate(requests) if request.sampling_params.has_filters]
    drawable = _apply_top_k_top_p_min_p(weights, filtered, requests) if filtered else weights
    greedy = [request.sampling_params.temperature == 0 for request in requests]
    if all(greedy):
        tokens = scores.argmax(-1)
    else:
        noise = uniform_noise(*_seeds_and_positions(requests))
        tokens = _sample_inverse_cdf(drawable, torch.from_numpy(noise).to(scores.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), tokens)
    chosen = scores.gather(-1, tokens.unsqueeze(-1))
    logprobs = (chosen - normalizer).squeeze(-1)
    _record_top_logprobs(scores, normalizer, requests)
    return tokens.tolist(), logprobs.tolist()


def _seeds_and_positions(requests: Sequence[EngineRequest]) -> tuple[list[int], list[int]]:
    """Seed and position of the tokens to come: all that chance depends on."""
    return [request.seed for request in requests], [len(request.token_ids) for request in requests]


def compute_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """`log softmax(logits)[target]` of each row, in float32."""
    scores = logits.float()
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)


def compute_top_logprobs(logits: Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each row with their logprobs, which equal those of `logprobs_of`."""
    if not num_top:
        return [[] for _ in range(len(logits))]
    scores = logits.float()
    values, tokens = (scores - scores.logsumexp(-1, keepdim=True)).topk(num_top)
    return [list(zip(*row)) for row in zip(tokens.tolist(), values.tolist())]


def _scale_logits(logits: Tensor, requests: Sequence[EngineRequest]) -> Tensor:
    """Biased logits over temperature, float32, never the caller's own memory."""
    scores = logits.to(torch.float32, copy=True)
    for row, request in enumerate(requests):
        if request.sampling_params.logit_bias:
            for token, bias in request.sampling_params.logit_bias:
                scores[row, token] += bias
    scales = [request.sampling_params.temperature or 1.0 for request in requests]
    if any(scale != 1.0 for scale in scales):
        scores.div_(torch.tensor(scales, device=scores.device).unsqueeze(-1))
    return scores


def _sample_inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row at `noise`."""
    rows, vocab = weights.shape
    if vocab <= MAX_SINGLE_STAGE_VOCAB:
        return _search_cumulative(weights, noise.unsqueeze(-1), None).squeeze(-1)
    if vocab % VOCAB_CHUNK:
        weights = torch.nn.functional.pad(weights, (0, VOCAB_CHUNK - vocab % VOCAB_CHUNK))
    groups = weights.view(rows, -1, VOCAB_CHUNK)
    sums = groups.sum(-1)
    outer = sums.cumsum(-1, dtype=torch.float64)
    aim = noise.unsqueeze(-1) * outer[:, -1:]
    group = _search_cumulative(sums, aim, outer)
    below = outer.gather(-1, group) - sums.gather(-1, group)
    inside = groups.gather(1, group.unsqueeze(-1).expand(-1, -1, VOCAB_CHUNK)).squeeze(1)
    token = _search_cumulative(inside, aim - below, inside.cumsum(-1, dtype=torch.float64))
    return (group * VOCAB_CHUNK + token).squeeze(-1)


def _search_cumulative(weights: Tensor, target: Tensor, cumulative: Tensor | None) -> Tensor:
    """The entry of each row whose share holds `aim` (a fraction of the row, if the sums are not given), [rows, 1].

    Sums round, so the aim may lie just beyond the last entry that has a share; then it is that one.
    """
    if cumulative is None:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        target = target * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=weights.shape[-1] - 1)  # NaN lies beyond everything


def _apply_top_k_top_p_min_p(weights: Tensor, rows: list[int], requests: Sequence[EngineRequest]) -> Tensor:
    """`weights` with 0 where a row's top-k, top-p or min-p leaves a token out. The most likely token always stays."""
    weights = weights.clone()
    for row in rows:
        sampling = requests[row].sampling_params
        values, order = weights[row].sort(descending=True, stable=True)
        keep = torch.ones_like(values, dtype=torch.bool)
        if sampling.top_k > 0:
            keep[sampling.top_k :] = False
        if sampling.top_p < 1:
            kept = values * keep
            keep &= kept.cumsum(-1) - kept < sampling.top_p * kept.sum()
        if sampling.min_p > 0:
            keep &= values >= sampling.min_p * values[0]
        keep[0] = True  # whatever sums and products round to
        weights[row, order[~keep]] = 0.0
    return weights


def _record_top_logprobs(scores: Tensor, normalizer: Tensor, requests: Sequence[EngineRequest]) -> None:
    """Record the most likely tokens for the requests that asked for them."""
    for row, request in enumerate(requests):
        if request.sampling_params.top_logprobs:
            values, tokens = (scores[row] - normalizer[row]).topk(request.sampling_params.top_logprobs)
            request.top_logprobs.append(list(zip(tokens.tolist(), values.tolist())))
