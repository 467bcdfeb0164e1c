"""Runtimes: where an agent's programs run.

One idea: a rollout gets a box of its own and leaves nothing behind, however it ends. `local` is a directory on this
machine, for code one trusts as far as one's own shell.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.runtime.base import Program as Program
    from ramify.runtime.base import Ran as Ran
    from ramify.runtime.base import Runtime as Runtime
    from ramify.runtime.config import LocalConfig as LocalConfig
    from ramify.runtime.config import RuntimeConfig as RuntimeConfig
    from ramify.runtime.local import LocalRuntime as LocalRuntime

_FACE = {
    "LocalConfig": "ramify.runtime.config",
    "LocalRuntime": "ramify.runtime.local",
    "Program": "ramify.runtime.base",
    "Ran": "ramify.runtime.base",
    "Runtime": "ramify.runtime.base",
    "RuntimeConfig": "ramify.runtime.config",
}

__all__ = ["LocalConfig", "LocalRuntime", "Program", "Ran", "Runtime", "RuntimeConfig"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.runtime' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
