"""What a model does with the product of its head before it returns logits: a scale, and a soft cap.

The trainer computes the head in chunks and has to do the same; the engine gets the logits of the model's own code.
Importable without torch.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # settings of configs that multiply logits
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MODELS_THAT_MULTIPLY = {"hyperclovax"}  # by the settings that divide elsewhere


class LogitTransform(NamedTuple):
    """Logits are `cap * tanh(scale * x / cap)` of the head's product x, or `scale * x` if `cap` is 0."""

    scale: float = 1.0
    cap: float = 0.0

    def apply(self, logits: "Tensor") -> "Tensor":
        """Return the logits of the head's product."""
        if self.cap:
            return (logits * (self.scale / self.cap)).tanh() * self.cap
        return logits if self.scale == 1 else logits * self.scale

    def differentiate(self, logits: "Tensor", gradient: "Tensor") -> "Tensor":
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
