"""An HTTP server that shares its process."""

import asyncio
import os
import signal
import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ramify.errors import ConfigInvalid, PortTaken
from ramify.wire.http_server import HttpServer


async def _hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", _hello)])


async def get(server: HttpServer) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_it_answers_at_a_free_port_until_it_is_closed():
    async def scene():
        async with HttpServer(APP, "127.0.0.1", name="a page") as server:
            assert (await get(server)).endswith(b"hello")
            with pytest.raises(PortTaken, match=f"another page: 127.0.0.1:{server.port} cannot be listened on"):
                await HttpServer(APP, "127.0.0.1", server.port, name="another page").start()
        await server.close()  # once more does nothing
        with pytest.raises(OSError):
            await get(server)

    asyncio.run(scene())


def test_an_address_of_another_machine_is_no_port_that_is_taken():
    said = "a page: 192.0.2.1:0 cannot be listened on: 192.0.2.1 is no address of this machine"
    with pytest.raises(ConfigInvalid, match=said):
        asyncio.run(HttpServer(APP, "192.0.2.1", name="a page").start())


def test_an_answer_does_not_wait_for_an_acknowledgement():
    """Connections inherit the option from the socket that listens."""

    async def scene():
        async with HttpServer(APP, "127.0.0.1", name="a page") as server:
            (listening,) = [sock for each in server._server.servers for sock in each.sockets]
            assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(scene())


def test_signals_are_its_owners():
    async def scene():
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, came.set)
        async with HttpServer(APP, "127.0.0.1", name="a page") as server:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(came.wait(), 10)
            assert (await get(server)).endswith(b"hello")

    asyncio.run(scene())
