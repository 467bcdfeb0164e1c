"""Evaluation: a taskset, a model, so many tasks, so many repetitions of each, and what that says.

One idea: an eval is a table of (task, repetition) pairs that is to be filled. Whatever ends it, the same command fills
what is missing; whatever changes, a pair is never filled twice. `evaluate` is the same from Python.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.evals.config import EvalConfig as EvalConfig
    from ramify.evals.run import Result as Result
    from ramify.evals.run import evaluate as evaluate

_FACE = {"EvalConfig": "ramify.evals.config", "Result": "ramify.evals.run", "evaluate": "ramify.evals.run"}

__all__ = ["EvalConfig", "Result", "evaluate"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.evals' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
