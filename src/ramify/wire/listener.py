"""Listening at an address, and the error if that fails. Importable without ZMQ."""

import errno
import os
import socket

from ramify.errors import ConfigInvalid, PortTaken, RamifyError

RESERVED_PORTS_VARIABLE = (
    "RAMIFY_RESERVED_PORTS"  # the environment variable with the ports that a supervisor holds for this process
)


def is_reserved(port: int) -> bool:
    """Whether the supervisor of this process holds the port for it."""
    return bool(port) and str(port) in os.environ.get(RESERVED_PORTS_VARIABLE, "").split(",")


def open_listener(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Listen at a port. If a supervisor holds it for this process, share it (SO_REUSEPORT). Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=is_reserved(port))


def to_bind_error(name: str, address: str, error_number: int | None, reason: str) -> RamifyError:
    """The failure of `what` that should listen at `address`, by the system's number and words for it.

    A port that is taken may be free again; anything else is as wrong the next time.
    """
    if error_number == errno.EADDRNOTAVAIL:
        reason = f"{address.rpartition('://')[2].rpartition(':')[0]} is no address of this machine"
    said = f"{name}: {address} cannot be listened on: {reason}"
    return PortTaken(said) if error_number == errno.EADDRINUSE else ConfigInvalid(said)
