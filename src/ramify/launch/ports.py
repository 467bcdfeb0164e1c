"""Where the processes of a run listen: chosen once, reserved for as long as the run lives, kept over every restart.

For each port the supervisor holds a socket that is bound but does not listen. No other program can then bind the port,
neither before the process listens nor while it is restarted. The process itself can: an environment variable tells it
that the port is reserved for it, and it sets SO_REUSEPORT, which the supervisor sets on its own socket after binding it
alone. Free ports are chosen below the range that the system gives to outgoing connections.
"""

import contextlib
import os
import random
import socket
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from ramify.config import raise_config_invalid
from ramify.orchestrate.config import RunConfig
from ramify.wire.listener import to_bind_error

HOST = "127.0.0.1"
EVAL_PORT_OFFSET = 1000  # eval source i listens so far above the base
PORT_RANGE = range(20_000, 30_000)  # where a port is looked for when any will do
MAX_BIND_TRIES = 100


def build_source_addresses(config: RunConfig) -> dict[str, str]:
    """Where the servers that the run starts for its sources listen, by name (`train/reverse`); port 0 is any."""
    base, found = config.launch.base_port, {}
    for kind, first, sources in (("train", base, config.train), ("eval", base + EVAL_PORT_OFFSET, config.eval)):
        for number, source in enumerate(sources):
            if source.address is None:
                found[f"{kind}/{source.source_name}"] = f"tcp://{HOST}:{first + number if base else 0}"
    return found


class PortReservation:
    """Addresses whose ports are held until the reservation is closed or garbage-collected."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Reserve `addresses`, by the name of their listener; port 0 is replaced by a free one.

        Raises PortTaken for one that is in use, ConfigInvalid for one that is not this machine's.
        """
        self.addresses: dict[str, str] = {}
        self._socket_fds: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close, self._socket_fds)
        for name, address in addresses.items():
            port, held = _reserve(name, address)
            self.addresses[name] = f"{address.rpartition(':')[0]}:{port}"
            if held is not None:
                self._socket_fds[name] = held.detach()

    def ports(self, *names: str) -> str:
        """Return the ports that are held for these listeners, separated by commas, for the environment variable."""
        return ",".join(str(urlsplit(self.addresses[name]).port) for name in names if name in self._socket_fds)

    def release(self, name: str) -> None:
        """Release a port whose process cannot set SO_REUSEPORT."""
        if name in self._socket_fds:
            os.close(self._socket_fds.pop(name))

    def close(self) -> None:
        """Release every port."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def assign_ports(addresses: Mapping[str, str]) -> dict[str, str]:
    """The addresses, by what listens there, with a port for each 0 that was free a moment ago."""
    with PortReservation(addresses) as reservation:
        return reservation.addresses


def _close(socket_fds: dict[str, int]) -> None:
    while socket_fds:
        os.close(socket_fds.popitem()[1])


def _reserve(listener_name: str, address: str) -> tuple[int, socket.socket | None]:
    """Return the port, and the socket that holds it.

    There is no socket for a configured port that has connections of an earlier run in TIME_WAIT: a listener can bind it
    with SO_REUSEADDR, but it cannot be held.
    """
    place = urlsplit(address)
    try:
        host, port = place.hostname, place.port
    except ValueError:  # its port is no number
        host = port = None
    if host is None or port is None:
        raise_config_invalid([(listener_name, f"expected {place.scheme or 'tcp'}://HOST:PORT, got {address}")])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = OSError()
    for number in [port] if port else random.sample(PORT_RANGE, MAX_BIND_TRIES):
        try:
            socket.create_server((host, number), family=family).close()
        except OSError as error:
            last = error
            continue
        held = socket.socket(family)
        with contextlib.suppress(OSError):
            held.bind((host, number))  # without SO_REUSEADDR, which would let other sockets bind it too
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return number, held
        held.close()
        if port:
            return port, None
    raise to_bind_error(listener_name, address, last.errno, str(last.strerror)) from last
