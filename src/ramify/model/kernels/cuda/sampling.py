"""Sampling on CUDA: from logits to tokens and logprobs, without a copy of the logits or a wait of the host.

It samples as `ramify.infer.sampler` does: one uniform number per token from a hash of seed and position, and the token
whose share of the cumulative distribution holds it. The first kernel sums parts of the vocabulary, the second selects a
part and the token in it. Temperature 0 takes the likeliest token. Sums are float32.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 2048  # tokens of the vocabulary that one program sums
GATHER_BLOCK = 256


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _gather_ids(IDS, SOURCES, SAMPLED, OUT, rows, BLOCK: tl.constexpr):
    """Write the token ids of a step: those that the host knows, or those that the step before has sampled."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    source = tl.load(SOURCES + row, mask=mask, other=-1)
    sampled = tl.load(SAMPLED + 2 * source, mask=mask & (source >= 0), other=0)
    tl.store(OUT + row, tl.where(source < 0, tl.load(IDS + row, mask=mask, other=0), sampled), mask=mask)


@triton.jit
def _load_scores(LOGITS, temperature, column, VOCAB: tl.constexpr):
    """Load logits over the temperature; greedy rows have temperature 0 and are not scaled."""
    scores = tl.load(LOGITS + column, mask=column < VOCAB, other=-float("inf")).to(tl.float32)
    return scores / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _sum_parts(
    LOGITS, TEMPERATURES, SUMS, BEST, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the largest score of a part of the vocabulary, where it is, and the sum of exponentials relative to it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    scores = _load_scores(LOGITS + row * VOCAB, tl.load(TEMPERATURES + row), column, VOCAB)
    largest = tl.max(scores, 0)
    index = row * PARTS + part
    tl.store(SUMS + 2 * index, largest)
    weights = tl.where(scores == -float("inf"), 0.0, tl.exp(scores - largest))  # a grammar may exclude the whole part
    tl.store(SUMS + 2 * index + 1, tl.sum(weights, 0))
    tl.store(BEST + index, tl.min(tl.where(scores == largest, column, VOCAB), 0))


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _select_tokens(
    LOGITS, TEMPERATURES, SEEDS, POSITIONS, LOGIT_ROWS, SUMS, BEST, SAMPLED,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sampled token of a row and, as the bits of a float, its logprob."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    is_part, index = part < PARTS, row * PARTS + part
    part_max = tl.load(SUMS + 2 * index, mask=is_part, other=-float("inf"))
    largest = tl.max(part_max, 0)
    part_sum = tl.load(SUMS + 2 * index + 1, mask=is_part, other=0.0) * tl.exp(part_max - largest)
    part_sum = tl.where(is_part, part_sum, 0.0)
    total = tl.sum(part_sum, 0)
    temperature = tl.load(TEMPERATURES + row)
    position = tl.load(POSITIONS + tl.load(LOGIT_ROWS + row)).to(tl.uint64) + 1
    seed = tl.load(SEEDS + row).to(tl.uint64, bitcast=True)
    mixed = _mix(_mix(seed) + position * 0x9E3779B97F4A7C15)
    noise = (mixed >> 11).to(tl.float64) * (2.0**-53)
    target = noise * total.to(tl.float64)
    cumulative = tl.cumsum(part_sum.to(tl.float64), 0)
    last_part = tl.max(tl.where(part_sum > 0, part, 0), 0)
    chosen = tl.minimum(tl.sum(((cumulative <= target) & is_part).to(tl.int32), 0), last_part)
    below = tl.sum(tl.where(part < chosen, part_sum.to(tl.float64), 0.0), 0)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    scores = _load_scores(LOGITS + row * VOCAB, temperature, column, VOCAB)
    weights = tl.exp(scores - largest)
    within = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, column, 0), 0)
    count = tl.sum((within.to(tl.float64) <= tl.maximum(target - below, 0.0)).to(tl.int32), 0)
    sampled = tl.minimum(chosen * BLOCK + count, last)
    best = tl.min(tl.where(part_max == largest, tl.load(BEST + index, mask=is_part, other=VOCAB), VOCAB), 0)
    token = tl.minimum(tl.where(temperature == 0, best, sampled), VOCAB - 1)
    score = tl.load(LOGITS + row * VOCAB + token).to(tl.float32) / tl.where(temperature == 0, 1.0, temperature)
    tl.store(SAMPLED + 2 * row, token)
    tl.store(SAMPLED + 2 * row + 1, (score - largest - tl.log(total)).to(tl.int32, bitcast=True))


# -- operators -------------------------------------------------------------------------------------------------------


def gather_ids(ids: Tensor, sources: Tensor, sampled: Tensor, out: Tensor) -> None:
    """Write the token ids of a step into `out`: `ids`, or where `sources` >= 0 that row of `sampled` [rows, 2]."""
    _gather_ids[(triton.cdiv(len(ids), GATHER_BLOCK),)](ids, sources, sampled, out, len(ids), BLOCK=GATHER_BLOCK)


def sample_rows(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, logit_rows: Tensor, sampled: Tensor
) -> None:
    """Sample a token for each row of contiguous `logits` [rows, vocab] into `sampled` [rows or more, 2].

    `positions` [tokens] are the positions of the step's tokens and `logit_rows` the token of each row. The second
    column of `sampled` holds the bits of the logprobs.
    """
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART)
    sums = torch.empty(rows, num_parts, 2, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
    _sum_parts[(rows, num_parts)](
        logits, temperatures, sums, best, VOCAB=vocab, PARTS=num_parts, BLOCK=PART, num_warps=4
    )
    _select_tokens[(rows,)](
        logits, temperatures, seeds, positions, logit_rows, sums, best, sampled,
        VOCAB=vocab, PARTS=num_parts, PARTS_BLOCK=triton.next_power_of_2(num_parts), BLOCK=PART, num_warps=4,
    )  # fmt: skip
