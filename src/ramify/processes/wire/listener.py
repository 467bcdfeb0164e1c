"""Listening sockets: opening one, the error if that fails, and ports that a supervisor reserves for its processes.

For each port the supervisor holds a socket that is bound but does not listen. No other program can then bind the port,
neither before the process listens nor while it restarts. The process itself can: an environment variable lists the
ports that are reserved for it, and it sets SO_REUSEPORT, which the supervisor sets on its own socket after binding it.
Importable without ZMQ.
"""

import contextlib
import errno
import os
import random
import socket
import weakref
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

from ramify.core.errors import ConfigInvalid, PortTaken, RamifyError

RESERVED_PORTS_VARIABLE = "RAMIFY_RESERVED_PORTS"  # set by a supervisor: the ports that it holds for this process
PORT_RANGE = range(20_000, 30_000)  # of free ports, below the range for outgoing connections
MAX_BIND_TRIES = 100


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


class PortReservation:
    """Addresses, by listener, whose ports are held until the reservation is closed or garbage-collected."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Reserve `addresses`, by the name of their listener; port 0 is replaced by a free port.

        Raises PortTaken for a port that is in use, ConfigInvalid for an address of another machine.
        """
        self.addresses: dict[str, str] = {}
        self._socket_fds: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close, self._socket_fds)
        for name, address in addresses.items():
            port, holder = _reserve(name, address)
            self.addresses[name] = f"{address.rpartition(':')[0]}:{port}"
            if holder is not None:
                self._socket_fds[name] = holder.detach()

    def format_ports(self) -> str:
        """Return the ports that are held, separated by commas."""
        return ",".join(str(urlsplit(self.addresses[name]).port) for name in self._socket_fds)

    def close(self) -> None:
        """Release every port."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(socket_fds: dict[str, int]) -> None:
    while socket_fds:
        os.close(socket_fds.popitem()[1])


def _reserve(listener_name: str, address: str) -> tuple[int, socket.socket | None]:
    """Return the port, and the socket that holds it.

    There is no socket for a configured port with connections of an earlier run in TIME_WAIT: a listener can bind it
    with SO_REUSEADDR, but it cannot be held.
    """
    url = urlsplit(address)
    host, port = url.hostname, url.port
    assert host is not None and port is not None  # the configuration was validated
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last_error = OSError()
    for candidate in [port] if port else random.sample(PORT_RANGE, MAX_BIND_TRIES):
        try:
            socket.create_server((host, candidate), family=family).close()
        except OSError as error:
            last_error = error
            continue
        holder = socket.socket(family)
        with contextlib.suppress(OSError):
            holder.bind((host, candidate))  # without SO_REUSEADDR, which would let other sockets bind it too
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return candidate, holder
        holder.close()
        if port:
            return port, None
    raise to_bind_error(listener_name, address, last_error.errno, str(last_error.strerror)) from last_error
