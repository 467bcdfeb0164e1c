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

ROW_STEP = 128  # chunks are multiples of this on CUDA, so that one compiled kernel serves them all
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}  # of the logits of a chunk: the cache of a core, a corner of a GPU
KEPT = {"cpu": 1, "cuda": 3}  # chunks whose logits the backward pass finds


def score(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprob of `token` and entropy for each row of `hidden` [rows, width], in float32; gradients flow through the
    logprob alone."""
    found: Any = _Score.apply(hidden, weight, bias, token, 1.0 / temperature)
    return found


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob, entropy, total = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        read = _kernel(_read, hidden.device.type)
        kept: deque[Tensor] = deque(maxlen=KEPT[hidden.device.type])
        for rows in _chunks(len(hidden), len(weight), hidden):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            logprob[rows], entropy[rows], total[rows] = read(logits, token[rows], scale[rows])
            kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, token, scale, total, *kept)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token, scale, total, *kept = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        chunks = _chunks(len(hidden), len(weight), hidden)
        whole = hidden.is_cuda and len(chunks) == 1  # a product of its own needs no sum in float32
        wanted = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted and not whole else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        turn = _kernel(_turn, hidden.device.type)
        for number, rows in enumerate(chunks, len(kept) - len(chunks)):
            logits = kept[number] if number >= 0 else torch.nn.functional.linear(hidden[rows], weight, bias)
            d_logits = turn(logits, token[rows], scale[rows], total[rows], grads[0][rows])
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if wanted:
                d_weight = _add_product(d_weight, d_logits.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _read(logits: Tensor, token: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, entropy and log-sum-exp of each row."""
    scaled = logits.float() * scale[:, None]
    total = scaled.logsumexp(-1)
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(1, token[:, None])[:, 0] - total, entropy, total


def _turn(logits: Tensor, token: Tensor, scale: Tensor, total: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits: (1 at the token − probability) · grad / temperature."""
    weight = (grad * scale)[:, None]
    found = -(logits.float() * scale[:, None] - total[:, None]).exp() * weight
    places = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(places == token[:, None], found + weight, found).to(logits.dtype)


@cache
def _kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """On CUDA one fused pass over the logits, compiled once for any number of rows."""
    if device == "cpu":
        return function
    compiled = torch.compile(function)

    def run(*columns: Tensor) -> Any:
        for column in columns:
            torch._dynamo.mark_dynamic(column, 0)
        return compiled(*columns)

    return run


def _chunks(rows: int, vocabulary: int, like: Tensor) -> list[slice]:
    most = max(1, CHUNK_BYTES[like.device.type] // (vocabulary * like.element_size()))
    count = -(-rows // most)
    size = -(-rows // count) if count else 1
    if like.device.type != "cpu":
        size = -(-size // ROW_STEP) * ROW_STEP
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed in the precision of `total`."""
    if total is None:
        return left @ right
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype)
    return total.add_(left @ right)
