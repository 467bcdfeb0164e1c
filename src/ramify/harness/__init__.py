"""Harnesses: the agent programs that solve a task.

One idea: a harness only has to bring its model calls to the rollout's `Session`, in process or over HTTP; whatever it
does between two calls is its own business. `chat` is the loop that most tasks need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.harness.base import Harness as Harness
    from ramify.harness.chat import ChatHarness as ChatHarness
    from ramify.harness.config import ChatHarnessConfig as ChatHarnessConfig
    from ramify.harness.config import HarnessConfig as HarnessConfig
    from ramify.harness.config import ServedModel as ServedModel

_FACE = {
    "ChatHarness": "ramify.harness.chat",
    "ChatHarnessConfig": "ramify.harness.config",
    "Harness": "ramify.harness.base",
    "HarnessConfig": "ramify.harness.config",
    "ServedModel": "ramify.harness.config",
}

__all__ = ["ChatHarness", "ChatHarnessConfig", "Harness", "HarnessConfig", "ServedModel"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.harness' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
