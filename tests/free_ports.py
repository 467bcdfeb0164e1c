"""Ports for servers that tests start later, in other processes."""

import random
import socket

PORTS = range(10_000, 20_000)  # below those that the system gives to others, and those that a run reserves


def find_free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    for port in random.sample(PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")
