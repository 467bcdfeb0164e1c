"""Where the processes of a run listen: chosen once, kept over every restart.

Free ports are all held at the same time while they are chosen, so that no two are the same.
"""

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from ramify.errors import PortTaken

HOST = "127.0.0.1"
EVALS = 1000  # eval source i listens so far above the base


def source_ports(base: int, train: int, evals: int) -> tuple[list[int], list[int]]:
    """The ports of so many train and eval sources; 0 for any where there is no base."""
    if base == 0:
        return [0] * train, [0] * evals
    return [base + i for i in range(train)], [base + EVALS + i for i in range(evals)]


def settled(ports: Sequence[int]) -> list[int]:
    """The ports with a free one for each 0. Raises PortTaken for one that somebody listens on."""
    with ExitStack() as held:
        listeners = [held.enter_context(_listener(port)) for port in ports]
        return [listener.getsockname()[1] for listener in listeners]


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise PortTaken(f"{HOST}:{port} cannot be listened on: {error.strerror}") from error
