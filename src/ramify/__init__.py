"""Ramify: reinforcement learning for language-model agents, where a rollout stays a tree until the gradient.

This is the public face. A name is loaded when it is first used, so `import ramify` costs nothing and a worker that
never trains never loads the parts that do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.trace import Trace as Trace

__version__ = "0.1.0"

_FACE = {"Trace": "ramify.trace"}

__all__ = ["Trace", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
