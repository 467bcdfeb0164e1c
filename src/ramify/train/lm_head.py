"""The LM head, scored only where something is trained, and never held whole.

Of a vocabulary's worth of logits per token only three numbers are wanted: the logprob of one token, the entropy, and
(for the way back) the log-sum-exp. So the head runs over chunks of rows; each chunk's logits live only until these are
read off, and are computed a second time in the backward pass; all but those of the last few, which are kept for it.
Temperature belongs to the row, not to the pack.
"""

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

ROW_MULTIPLE = 128  # chunks are multiples of this on CUDA, so that one compiled kernel serves them all
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}  # of the logits of a chunk: the cache of a core, a corner of a GPU
KEPT_CHUNKS = {"cpu": 1, "cuda": 3}  # chunks whose logits the backward pass finds


def compute_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprob of `token` and entropy for each row of `hidden` [rows, width], in float32; gradients flow through the
    logprob alone."""
    found: Any = _ChunkedLogprobs.apply(hidden, weight, bias, target_ids, 1.0 / temperature)
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, inv_temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob, entropy, total = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        read = _compile_for_device(_compute_logprob_entropy_lse, hidden.device.type)
        kept: deque[Tensor] = deque(maxlen=KEPT_CHUNKS[hidden.device.type])
        for rows in _split_rows(len(hidden), len(weight), hidden):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            logprob[rows], entropy[rows], total[rows] = read(logits, target_ids[rows], inv_temperature[rows])
            kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, target_ids, inv_temperature, total, *kept)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token, scale, total, *kept = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        chunks = _split_rows(len(hidden), len(weight), hidden)
        whole = hidden.is_cuda and len(chunks) == 1  # a product of its own needs no sum in float32
        wanted = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted and not whole else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        turn = _compile_for_device(_compute_logits_gradient, hidden.device.type)
        for number, rows in enumerate(chunks, len(kept) - len(chunks)):
            logits = kept[number] if number >= 0 else torch.nn.functional.linear(hidden[rows], weight, bias)
            d_logits = turn(logits, token[rows], scale[rows], total[rows], grads[0][rows])
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if wanted:
                d_weight = _accumulate_matmul(d_weight, d_logits.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _compute_logprob_entropy_lse(
    logits: Tensor, target_ids: Tensor, inv_temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, entropy and log-sum-exp of each row."""
    scaled = logits.float() * inv_temperature[:, None]
    total = scaled.logsumexp(-1)
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(1, target_ids[:, None])[:, 0] - total, entropy, total


def _compute_logits_gradient(
    logits: Tensor, target_ids: Tensor, inv_temperature: Tensor, logsumexp: Tensor, grad: Tensor
) -> Tensor:
    """The gradient of the logits: (1 at the token − probability) · grad / temperature."""
    weight = (grad * inv_temperature)[:, None]
    found = -(logits.float() * inv_temperature[:, None] - logsumexp[:, None]).exp() * weight
    places = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(places == target_ids[:, None], found + weight, found).to(logits.dtype)


@cache
def _compile_for_device(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On CUDA one fused pass over the logits, compiled once for any number of rows."""
    if device_type == "cpu":
        return function
    compiled = torch.compile(function)

    def run(*columns: Tensor) -> Any:
        for column in columns:
            torch._dynamo.mark_dynamic(column, 0)
        return compiled(*columns)

    return run


def _split_rows(num_rows: int, vocab_size: int, hidden: Tensor) -> list[slice]:
    most = max(1, CHUNK_BYTES[hidden.device.type] // (vocab_size * hidden.element_size()))
    count = -(-num_rows // most)
    size = -(-num_rows // count) if count else 1
    if hidden.device.type != "cpu":
        size = -(-size // ROW_MULTIPLE) * ROW_MULTIPLE
    return [slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size)]


def _accumulate_matmul(accumulator: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed in the precision of `total`."""
    if accumulator is None:
        return left @ right
    if left.dtype == accumulator.dtype:
        return accumulator.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(accumulator, left, right, out_dtype=accumulator.dtype)
    return accumulator.add_(left @ right)
