"""Env servers: rollouts in worker processes, behind one address that outlives any of them.

One idea: nothing is believed that is not seen. A worker is dead when its process is gone, hung when its event loop has
stood still for too long, ready when it has said so; what it held runs again elsewhere, a bounded number of times.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.envserver.child import EnvServerChild as EnvServerChild
    from ramify.envserver.client import EnvClient as EnvClient
    from ramify.envserver.config import EnvServerConfig as EnvServerConfig
    from ramify.envserver.config import ServedSourceConfig as ServedSourceConfig
    from ramify.envserver.server import EnvServer as EnvServer

_FACE = {
    "EnvClient": "client",
    "EnvServer": "server",
    "EnvServerChild": "child",
    "EnvServerConfig": "config",
    "ServedSourceConfig": "config",
}

__all__ = ["EnvClient", "EnvServer", "EnvServerChild", "EnvServerConfig", "ServedSourceConfig"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.envserver' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.envserver.{_FACE[name]}"), name)
    globals()[name] = value
    return value
