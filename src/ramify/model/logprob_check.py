"""Check on a few tokens, when a model is loaded, that the engine or the trainer gets the logits of the model itself.

Both call a model in their own ways: with other attention functions and explicit positions, and the trainer calls body
and head separately. Some models compute more than that, such as layers in the head, or positions that do not begin at
0. Such a model would be sampled or trained wrongly without any error. So both compare their logprobs with the model's
own forward, and raise ModelUnsupported if they differ.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ramify.core.errors import ModelUnsupported
from ramify.model.device_memory import is_out_of_memory
from ramify.model.pack_layout import VISION_MODEL_TYPES

NUM_CHECK_TOKENS = 16
MAX_DIFFERENCE = {torch.float32: 2e-3}
"""The largest median difference of logprobs that is accepted, by dtype. The median, because rounding may send single
tokens to other experts."""
DEFAULT_MAX_DIFFERENCE = 0.25


def build_check_ids(config: Any, num_tokens: int = NUM_CHECK_TOKENS) -> Tensor:
    """Return token ids that are spread over the vocabulary and have no special meaning."""
    text_config = config.get_text_config()
    special = collect_token_ids((config, text_config), ("pad_token_id", "bos_token_id", "eos_token_id"))
    plain = [token for token in range(text_config.vocab_size) if token not in special] or [0]
    return torch.tensor([plain[(13 + 7919 * index) % len(plain)] for index in range(num_tokens)])


def collect_token_ids(configs: Iterable[Any], names: Sequence[str]) -> frozenset[int]:
    """Return the token ids in the settings `names` of some configs; a setting may be an id, a list of them, or None."""
    values = (getattr(config, name, None) for config in configs for name in names)
    return frozenset(id for value in values for id in ([value] if isinstance(value, int) else value or ()))


@torch.no_grad()
def compute_reference_logprobs(module: Any, ids: Tensor, attn_implementation: str | None) -> Tensor:
    """Return the logprob of each token but the first, by the model's own forward with eager attention.

    `attn_implementation` is the one that the model was loaded with, which is restored; None changes nothing.
    """
    if attn_implementation is not None:
        module.set_attn_implementation(split_attn_implementation(module.config, "eager"))
    try:
        logits = module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelUnsupported(
            f"{type(module).__name__} cannot compute its own logits: {describe_error(error)}"
        ) from error
    finally:
        if attn_implementation is not None:
            module.set_attn_implementation(split_attn_implementation(module.config, attn_implementation))
    return compute_logprobs(logits[:-1], ids[1:])


def split_attn_implementation(config: Any, name: str | None) -> Any:
    """Return the attention implementation `name` as transformers takes it: only for the decoder, not for a tower."""
    if name is None or config.model_type not in VISION_MODEL_TYPES:
        return name
    return {"text_config": name, "vision_config": "sdpa"}


def compute_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logprob of each token by its row of logits, in float32."""
    scores = logits.float()
    return scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)


def check_logprobs(component: str, module: Any, expected: Tensor, actual: Tensor) -> None:
    """Raise ModelUnsupported if the logprobs of a component, the engine or the trainer, are not the model's own."""
    difference = float((expected.float() - actual.float()).abs().median())
    if not difference <= MAX_DIFFERENCE.get(module.dtype, DEFAULT_MAX_DIFFERENCE):  # rejects NaN too
        raise unsupported_error(component, module, f"logprobs of check tokens differ by {difference:.2g}")


def unsupported_error(component: str, module: Any, reason: str | Exception) -> ModelUnsupported:
    """Return the error for a model that a component computes differently, or cannot compute."""
    reason = reason if isinstance(reason, str) else describe_error(reason)
    model_class = type(module).__name__
    return ModelUnsupported(f"{model_class}: the {component} does not compute what the model itself does: {reason}")


def describe_error(error: Exception) -> str:
    """Return the type and the first line of an error, and the second if the first ends with a colon.

    transformers adds pages.
    """
    first, _, rest = f"{type(error).__name__}: {error}".partition("\n")
    return f"{first} {rest.strip().splitlines()[0]}" if first.endswith(":") and rest.strip() else first
