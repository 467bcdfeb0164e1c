"""Where the processes of a run listen: chosen once, reserved for as long as the run lives, kept over every restart.

The supervisor holds a socket at each port that is bound and does not listen. Nobody else can bind the port, neither
before its process listens nor while that is started again. The process itself may: it is told that the port is reserved
for it, and sets SO_REUSEPORT, as the supervisor has done after it bound the port alone. Free ports lie below those that
the system gives to outgoing connections.
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

from ramify.config import refuse
from ramify.orchestrate.config import RunConfig
from ramify.wire.listening import not_listening

HOST = "127.0.0.1"
EVALS = 1000  # eval source i listens so far above the base
ANY = range(20_000, 30_000)  # where a port is looked for when any will do
TRIES = 100


def source_addresses(config: RunConfig) -> dict[str, str]:
    """Where the servers that the run starts for its sources listen, by name (`train/reverse`); port 0 is any."""
    base, found = config.launch.base_port, {}
    for kind, first, sources in (("train", base, config.train), ("eval", base + EVALS, config.eval)):
        for number, source in enumerate(sources):
            if source.address is None:
                found[f"{kind}/{source.title}"] = f"tcp://{HOST}:{first + number if base else 0}"
    return found


class Reservation:
    """Addresses with a port each, held until it is closed, or nobody refers to it any more."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Reserve `addresses`, by what listens there, with a free port for each 0.

        Raises PortTaken for one that is in use, ConfigInvalid for one that is not this machine's.
        """
        self.places: dict[str, str] = {}
        self._held: dict[str, int] = {}
        self._closing = weakref.finalize(self, _close, self._held)
        for what, address in addresses.items():
            port, held = _reserve(what, address)
            self.places[what] = f"{address.rpartition(':')[0]}:{port}"
            if held is not None:
                self._held[what] = held.detach()

    def ports(self, *names: str) -> str:
        """Return the ports that are held for these listeners, as their process is told them."""
        return ",".join(str(urlsplit(self.places[name]).port) for name in names if name in self._held)

    def release(self, what: str) -> None:
        """Let go of a port whose process cannot share it."""
        if what in self._held:
            os.close(self._held.pop(what))

    def close(self) -> None:
        """Let go of every port."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def settled(addresses: Mapping[str, str]) -> dict[str, str]:
    """The addresses, by what listens there, with a port for each 0 that was free a moment ago."""
    with Reservation(addresses) as reservation:
        return reservation.places


def _close(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _reserve(what: str, address: str) -> tuple[int, socket.socket | None]:
    """Return the port, and the socket that holds it.

    There is none for a port that was asked for and has connections of an earlier run which are not forgotten yet: it
    can be listened on, and not be held.
    """
    place = urlsplit(address)
    try:
        host, port = place.hostname, place.port
    except ValueError:  # its port is no number
        host = port = None
    if host is None or port is None:
        refuse([(what, f"expected {place.scheme or 'tcp'}://HOST:PORT, got {address}")])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = OSError()
    for number in [port] if port else random.sample(ANY, TRIES):
        try:
            socket.create_server((host, number), family=family).close()
        except OSError as error:
            last = error
            continue
        held = socket.socket(family)
        with contextlib.suppress(OSError):
            held.bind((host, number))  # alone: without SO_REUSEADDR, with which others could join
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return number, held
        held.close()
        if port:
            return port, None
    raise not_listening(what, address, last.errno, str(last.strerror)) from last
