"""Opening a listening socket, and the error if that fails. Importable without ZMQ."""

import errno
import os
import socket

from ramify.core.errors import ConfigInvalid, PortTaken, RamifyError

RESERVED_PORTS_VARIABLE = "RAMIFY_RESERVED_PORTS"  # set by a supervisor: the ports that it holds for this process


def is_reserved(port: int) -> bool:
    """Whether the supervisor of this process holds the port for it."""
    return bool(port) and str(port) in os.environ.get(RESERVED_PORTS_VARIABLE, "").split(",")


def open_listener(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens on the port. A port that a supervisor holds is shared (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=is_reserved(port))


def to_bind_error(name: str, address: str, error_number: int | None, reason: str) -> RamifyError:
    """Convert an OS error to a failure: PortTaken (retryable) for EADDRINUSE, ConfigInvalid for anything else.

    `name` names the server or the config key in the message; `error_number` and `reason` are the OS error.
    """
    if error_number == errno.EADDRNOTAVAIL:
        reason = f"{address.rpartition('://')[2].rpartition(':')[0]} is not an address of this machine"
    message = f"{name}: {address} cannot be listened on: {reason}"
    return PortTaken(message) if error_number == errno.EADDRINUSE else ConfigInvalid(message)
