"""Supervised training on conversations: the same trainer, fed from a dataset in place of rollouts.

An example is a trace and a batch is a forest, so what examples share (a system prompt, a document asked about ten
times) is computed once. Names load when they are used: configuration, data and plan need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.train.sft.config import SftConfig as SftConfig
    from ramify.train.sft.run import Result as Result
    from ramify.train.sft.run import sft as sft
    from ramify.train.sft.run import train as train

_FACE = {
    "Result": "ramify.train.sft.run",
    "SftConfig": "ramify.train.sft.config",
    "sft": "ramify.train.sft.run",
    "train": "ramify.train.sft.run",
}

__all__ = ["Result", "SftConfig", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.train.sft' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
