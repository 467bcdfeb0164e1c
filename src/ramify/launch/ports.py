"""Where the processes of a run listen: chosen once, kept over every restart.

Free ports are all held at the same time while they are chosen, so that no two are the same. They lie below those that
the system gives to outgoing connections: one of these would hold the port just when a process is started again.
"""

import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
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


def settled(addresses: Mapping[str, str]) -> dict[str, str]:
    """The addresses, by what listens there, with a free port for each 0.

    Raises PortTaken for one that is in use, ConfigInvalid for one that is not this machine's.
    """
    with ExitStack() as held:
        listeners = {what: held.enter_context(_listener(what, address)) for what, address in addresses.items()}
        ports = {what: listener.getsockname()[1] for what, listener in listeners.items()}
    return {what: f"{address.rpartition(':')[0]}:{ports[what]}" for what, address in addresses.items()}


def _listener(what: str, address: str) -> socket.socket:
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
            return socket.create_server((host, number), family=family)
        except OSError as error:
            last = error
    raise not_listening(what, address, last.errno, str(last.strerror)) from last
