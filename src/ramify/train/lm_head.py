"""Logprobs and entropies from the LM head in chunks, so that the logits need not exist as a whole.

Training needs three numbers of each row of logits: the logprob of one token, the entropy and, for the backward pass,
the log-sum-exp. So the head runs over chunks of rows; the logits of a chunk live until these numbers are computed, and
are computed again in the backward pass. Only the last few chunks keep their logits for it, or more chunks if a
GPU has much free memory. Every row has a temperature of its own. Some models scale the product of the head or limit it
with a tanh, which happens in the chunks; an engine gets the logits of the model's own code.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ramify.model.device_memory import get_free_bytes

ROW_MULTIPLE = 128  # on CUDA chunks have a multiple of this many rows, which suits matrix products
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}  # size of a chunk's logits: a core's cache, a small part of a GPU
KEPT_CHUNKS = {"cpu": 1, "cuda": 3}  # minimum number of chunks whose logits are kept for the backward pass
KEPT_FRACTION = 0.25  # of a GPU's free memory: kept logits may take this much, or the minimum if that is more
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # settings of configs that multiply logits
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MODELS_THAT_MULTIPLY = {"hyperclovax"}  # by the settings that divide elsewhere


class LogitTransform(NamedTuple):
    """Logits are `cap * tanh(scale * x / cap)` of the head's product x, or `scale * x` if `cap` is 0."""

    scale: float = 1.0
    cap: float = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits of the head's product."""
        if self.cap:
            return (logits * (self.scale / self.cap)).tanh() * self.cap
        return logits if self.scale == 1 else logits * self.scale

    def differentiate(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the head's product, given transformed logits and their gradient."""
        if self.cap:
            gradient = gradient * (1 - (logits / self.cap).square())
        return gradient if self.scale == 1 else gradient * self.scale


def read_logit_transform(text_config: Any) -> LogitTransform:
    """Return the transform of a model by its Hugging Face text config."""

    def collect(names: tuple[str, ...]) -> list[float]:
        return [value for name in names if (value := getattr(text_config, name, None)) is not None]

    divisor, scale = math.prod(collect(DIVISORS)), math.prod(collect(MULTIPLIERS))
    scale *= divisor if text_config.model_type in MODELS_THAT_MULTIPLY else 1 / divisor
    return LogitTransform(scale, next(iter(collect(CAPS)), 0.0))


IDENTITY = LogitTransform()


def compute_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: Tensor,
    top_ids: Tensor,
    transform: LogitTransform = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each row of `hidden` [rows, width], the logprob of the target token, the entropy, and other logprobs.

    The other logprobs are for `top_ids` [rows, k]. All are in float32; the entropy has no gradient.
    """
    free_bytes = get_free_bytes(hidden.device) if hidden.is_cuda else 0
    num_kept = count_kept_chunks(hidden.device.type, free_bytes, weight.numel())
    columns = target_ids, 1.0 / temperature, top_ids
    result: Any = _ChunkedLogprobs.apply(hidden, weight, bias, *columns, transform, num_kept)
    return result


def count_kept_chunks(device_type: str, free_bytes: int, num_weights: int) -> int:
    """Return the number of chunks whose logits are kept, on a device with this much free memory; 0 without gradients.

    Two float32 tensors of `num_weights` elements have room beside them: the summed gradient of the head, and the part
    of one chunk.
    """
    if not torch.is_grad_enabled():
        return 0
    available_bytes = KEPT_FRACTION * (free_bytes - 2 * torch.float32.itemsize * num_weights)
    return max(KEPT_CHUNKS[device_type], int(available_bytes // CHUNK_BYTES[device_type]))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        inv_temperature: Tensor,
        top_ids: Tensor,
        transform: LogitTransform,
        num_kept: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        target_ids, inv_temperature = target_ids.contiguous(), inv_temperature.contiguous()
        logprob, entropy, logsumexp = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        top_logprob = hidden.new_empty(top_ids.shape, dtype=torch.float32)
        reduce_logits, _ = _get_logit_functions(hidden.device.type)
        kept_logits: deque[Tensor] = deque(maxlen=num_kept)
        for rows in _split_rows(len(hidden), len(weight), hidden):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            logprob[rows], entropy[rows], logsumexp[rows] = reduce_logits(
                logits, target_ids[rows], inv_temperature[rows], transform
            )
            if top_ids.shape[1]:
                top_logits = transform.apply(logits.gather(1, top_ids[rows]).float()) * inv_temperature[rows, None]
                top_logprob[rows] = top_logits - logsumexp[rows, None]
            kept_logits.append(logits)
        ctx.save_for_backward(hidden, weight, bias, target_ids, inv_temperature, top_ids, logsumexp, *kept_logits)
        ctx.mark_non_differentiable(entropy)
        ctx.transform = transform
        return logprob, entropy, top_logprob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, inv_temperature, top_ids, logsumexp, *kept_logits = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        chunks = _split_rows(len(hidden), len(weight), hidden)
        single_chunk = hidden.is_cuda and len(chunks) == 1  # one product needs no float32 accumulator
        transform: LogitTransform = ctx.transform
        needs_weight_grad = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad and not single_chunk else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        _, differentiate_logits = _get_logit_functions(hidden.device.type)
        for kept, rows in enumerate(chunks, len(kept_logits) - len(chunks)):
            logits = kept_logits[kept] if kept >= 0 else torch.nn.functional.linear(hidden[rows], weight, bias)
            d_logits = differentiate_logits(
                logits, target_ids[rows], inv_temperature[rows], logsumexp[rows], grads[0][rows].contiguous(), transform
            )
            if top_ids.shape[1]:
                columns = logits, top_ids[rows], inv_temperature[rows], logsumexp[rows], grads[2][rows]
                d_logits += _compute_top_gradient(*columns, transform)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if needs_weight_grad:
                d_weight = _accumulate_matmul(d_weight, d_logits.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *[None] * 5,
        )


def _reduce_logits(
    logits: Tensor, target_ids: Tensor, inv_temperature: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = transform.apply(logits.float()) * inv_temperature[:, None]
    logsumexp = scaled.logsumexp(-1)
    entropy = logsumexp - ((scaled - logsumexp[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(1, target_ids[:, None])[:, 0] - logsumexp, entropy, logsumexp


def _differentiate_logits(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    transform: LogitTransform,
) -> Tensor:
    """Return (1 at the target token − probability) · grad / temperature, times the derivative of the transform."""
    weight, transformed = (grad * inv_temperature)[:, None], transform.apply(logits.float())
    gradient = -(transformed * inv_temperature[:, None] - logsumexp[:, None]).exp() * weight
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.where(token_ids == target_ids[:, None], gradient + weight, gradient)
    return transform.differentiate(transformed, gradient).to(logits.dtype)


def _compute_top_gradient(
    logits: Tensor, top_ids: Tensor, inv_temperature: Tensor, logsumexp: Tensor, grad: Tensor, transform: LogitTransform
) -> Tensor:
    """Return Σ over the k tokens of (1 at the token − probability) · grad / temperature, times the derivative."""
    weights, transformed = grad * inv_temperature[:, None], transform.apply(logits.float())
    probability = (transformed * inv_temperature[:, None] - logsumexp[:, None]).exp()
    gradient = (-probability * weights.sum(1, keepdim=True)).scatter_add_(1, top_ids, weights)
    return transform.differentiate(transformed, gradient).to(logits.dtype)


def _get_logit_functions(device_type: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions for the forward and the backward pass; on CUDA each launches one kernel."""
    if device_type == "cpu":
        return _reduce_logits, _differentiate_logits
    from ramify.model.kernels.cuda.logits import differentiate_logits, reduce_logits  # needs Triton

    return reduce_logits, differentiate_logits


def _split_rows(num_rows: int, vocab_size: int, hidden: Tensor) -> list[slice]:
    max_rows = max(1, CHUNK_BYTES[hidden.device.type] // (vocab_size * hidden.element_size()))
    num_chunks = -(-num_rows // max_rows)
    size = -(-num_rows // num_chunks) if num_chunks else 1
    if hidden.device.type != "cpu":
        size = -(-size // ROW_MULTIPLE) * ROW_MULTIPLE
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _accumulate_matmul(accumulator: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return accumulator + left @ right, summed in the accumulator's dtype; without one, the product alone."""
    if accumulator is None:
        return left @ right
    if left.dtype == accumulator.dtype:
        return accumulator.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(accumulator, left, right, out_dtype=accumulator.dtype, out=accumulator)
    return accumulator.add_(left @ right)
