"""The trainer: forests in, gradients, new weights and metrics out.

It knows tokens, weights and components, not algorithms. One idea: N_c travels with the batch and gradients are summed,
so a step's result does not depend on how the batch was packed or shared out. Names load when they are used: the
configuration and the losses need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.train.batches import Batch as Batch
    from ramify.train.batches import lay_out as lay_out
    from ramify.train.build import build_trainer as build_trainer
    from ramify.train.config import TrainerConfig as TrainerConfig
    from ramify.train.losses import Entries as Entries
    from ramify.train.losses import Term as Term
    from ramify.train.losses import find_loss as find_loss
    from ramify.train.metrics import StepMetrics as StepMetrics
    from ramify.train.step import Trainer as Trainer

_FACE = {
    "Batch": "ramify.train.batches",
    "Entries": "ramify.train.losses",
    "StepMetrics": "ramify.train.metrics",
    "Term": "ramify.train.losses",
    "Trainer": "ramify.train.step",
    "TrainerConfig": "ramify.train.config",
    "build_trainer": "ramify.train.build",
    "find_loss": "ramify.train.losses",
    "lay_out": "ramify.train.batches",
}

__all__ = [
    "Batch",
    "Entries",
    "StepMetrics",
    "Term",
    "Trainer",
    "TrainerConfig",
    "build_trainer",
    "find_loss",
    "lay_out",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.train' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
