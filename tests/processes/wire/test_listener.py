"""Reserved ports: no other program can bind one, whether its process listens or not."""

import os
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from ramify.core.errors import PortTaken
from ramify.processes.wire import WireServer
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE, PortReservation

LISTENS = """
import asyncio, sys
from starlette.applications import Starlette
from ramify.processes.wire import WireServer
from ramify.processes.wire.http_server import HttpServer

async def main():
    async with WireServer({}, sys.argv[1]), HttpServer(Starlette(), "127.0.0.1", int(sys.argv[2]), name="status"):
        print("listening", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def get_port(address: str) -> int:
    return urlsplit(address).port or 0


def is_free(port: int) -> bool:
    """Return whether another program could listen on the port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.process
def test_reserved_port_is_exclusive_through_restarts():
    with PortReservation({"wire": "tcp://127.0.0.1:0", "status": "http://127.0.0.1:0"}) as reservation:
        ports = [get_port(reservation.addresses["wire"]), get_port(reservation.addresses["status"])]
        command = [sys.executable, "-c", LISTENS, reservation.addresses["wire"], str(ports[1])]
        environment = {**os.environ, RESERVED_PORTS_VARIABLE: reservation.format_ports()}
        for _ in range(2):
            assert not any(map(is_free, ports))  # no process listens, and no other program can
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            try:
                assert child.stdout.readline() == "listening\n"
                assert not any(map(is_free, ports))
                for port in ports:
                    socket.create_connection(("127.0.0.1", port), timeout=10).close()
            finally:
                child.kill()
                child.communicate()
            with pytest.raises(ConnectionRefusedError):  # a held port accepts no connections
                socket.create_connection(("127.0.0.1", ports[0]), timeout=10)
    assert all(map(is_free, ports))


async def test_port_cannot_be_reserved_twice():
    with PortReservation({"first": "tcp://127.0.0.1:0"}) as reservation:
        with pytest.raises(PortTaken, match=r"second: tcp://127.0.0.1:"):
            PortReservation({"second": reservation.addresses["first"]})

        with pytest.raises(PortTaken):  # a process without the environment variable
            async with WireServer({}, reservation.addresses["first"]):
                pass


def test_unreferenced_reservation_is_released():
    port = get_port(PortReservation({"it": "tcp://127.0.0.1:0"}).addresses["it"])
    assert is_free(port)
