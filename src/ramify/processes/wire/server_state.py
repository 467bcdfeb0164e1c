"""The states of the servers in a list of addresses that may change. Importable without ZMQ.

The clients of inference servers and of env servers use them; the modules of their pools have the transitions.
"""

from enum import Enum

JOIN_INTERVAL = 0.1  # seconds between two tries to join a server that was never up
STRAGGLER_TIMEOUT = 10.0  # seconds for further servers to come up once one is up


class ServerState(Enum):
    """Whether a server receives requests."""

    UP = "up"
    DOWN = "down"
    REMOVED = "removed"
