"""The wire: requests, streamed replies and cancels between processes, over ZMQ.

One idea: a connection is two numbered streams. A frame is kept until the other side says it has it, so a connection
that breaks loses nothing and repeats nothing, and what is left of a request is its number, its deadline and its answer.
A thread beside the event loop sees to the clock: a loop that is busy delays answers, never heartbeats.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.wire.address import is_local as is_local
    from ramify.wire.client import Client as Client
    from ramify.wire.frames import VERSION as VERSION
    from ramify.wire.message import Message as Message
    from ramify.wire.pulse import Pulse as Pulse
    from ramify.wire.server import Request as Request
    from ramify.wire.server import Server as Server
    from ramify.wire.settings import Settings as Settings

_FACE = {
    "VERSION": "frames",
    "Client": "client",
    "Message": "message",
    "Pulse": "pulse",
    "Request": "server",
    "Server": "server",
    "Settings": "settings",
    "is_local": "address",
}

__all__ = ["VERSION", "Client", "Message", "Pulse", "Request", "Server", "Settings", "is_local"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.wire' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.wire.{_FACE[name]}"), name)
    globals()[name] = value
    return value
