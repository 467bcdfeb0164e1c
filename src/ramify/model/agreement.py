"""Whether our way of calling a model gives the logits of the model itself, tried on a few tokens when it is loaded.

The engine and the trainer call a model in their own ways: with other attention functions, with positions, and the
trainer also body and head one after the other. Some models compute more than that, such as layers in the head or
positions that begin elsewhere. They would be sampled or trained wrongly without any error, so both compare what they
get with the model's own forward and refuse by name.
"""

from typing import Any

import torch
from torch import Tensor

from ramify.errors import ModelUnsupported, RamifyError

TOKENS = 16
LIMITS = {torch.float32: 2e-3}
"""Largest median difference of logprobs, by the dtype of the computation. The median, because rounding may send single
tokens to other experts."""
ROUGH = 0.25  # for all other dtypes


def trial_ids(config: Any, count: int = TOKENS) -> Tensor:
    """Return token ids that are spread over the vocabulary and have no special meaning."""
    text = config.get_text_config()
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    special: set[int] = set()
    for value in (getattr(part, name, None) for part in (config, text) for name in names):
        special.update([value] if isinstance(value, int) else value or ())
    plain = [token for token in range(text.vocab_size) if token not in special] or [0]
    return torch.tensor([plain[(13 + 7919 * number) % len(plain)] for number in range(count)])


@torch.no_grad()
def own_logprobs(module: Any, ids: Tensor, attention: str | None) -> Tensor:
    """Return the logprob of each token but the first by the model's plain forward, without our attention.

    `attention` is the implementation the model was loaded with, which it has again afterwards.
    """
    if attention is not None:
        module.set_attn_implementation("eager")
    try:
        logits = module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelUnsupported(f"{type(module).__name__} cannot compute its own logits: {_describe(error)}") from error
    finally:
        if attention is not None:
            module.set_attn_implementation(attention)
    return logprobs_of(logits[:-1], ids[1:])


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logprob that each row of logits gives to its token, in float32."""
    return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def compare(who: str, module: Any, expected: Tensor, actual: Tensor) -> None:
    """Raise ModelUnsupported if `who`, the engine or the trainer, does not get the logprobs of the model itself."""
    difference = float((expected.float() - actual.float()).abs().median())
    if not difference <= LIMITS.get(module.dtype, ROUGH):  # NaN is refused as well
        raise disagreement(who, module, f"logprobs of a trial differ by {difference:.2g}")


def disagreement(who: str, module: Any, reason: str | Exception) -> RamifyError:
    """Make the refusal of a model."""
    reason = reason if isinstance(reason, str) else _describe(reason)
    return ModelUnsupported(f"{type(module).__name__}: the {who} does not compute what the model itself does: {reason}")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
