"""The embedded HTTP server."""

import asyncio
import os
import signal
import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ramify.core.errors import ConfigInvalid, PortTaken
from ramify.processes.wire.http_server import HttpServer


async def _hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", _hello)])


async def get(server: HttpServer) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    response = await reader.read()
    writer.close()
    return response


async def test_server_listens_on_a_free_port_until_closed():
    async with HttpServer(APP, "127.0.0.1", name="a page") as server:
        assert (await get(server)).endswith(b"hello")
        with pytest.raises(PortTaken, match=f"another page: 127.0.0.1:{server.port} cannot be listened on"):
            await HttpServer(APP, "127.0.0.1", server.port, name="another page").start()
    await server.close()  # closing it again does nothing
    with pytest.raises(OSError):
        await get(server)


def test_foreign_address_is_config_invalid_not_port_taken():
    message = "a page: 192.0.2.1:0 cannot be listened on: 192.0.2.1 is not an address of this machine"
    with pytest.raises(ConfigInvalid, match=message):
        asyncio.run(HttpServer(APP, "192.0.2.1", name="a page").start())


async def test_connections_have_tcp_nodelay():
    """Connections inherit the option from the socket that listens."""

    async with HttpServer(APP, "127.0.0.1", name="a page") as server:
        (listener,) = [sock for server_ in server._server.servers for sock in server_.sockets]
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_signals_are_left_to_the_process():
    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
    async with HttpServer(APP, "127.0.0.1", name="a page") as server:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(received.wait(), 60)
        assert (await get(server)).endswith(b"hello")


async def _crash(*_: object, **__: object) -> None:
    raise RuntimeError("the event loop is broken")


async def test_error_during_start_is_raised(monkeypatch):
    server = HttpServer(APP, "127.0.0.1", name="a page")
    monkeypatch.setattr(server._server, "startup", _crash)
    with pytest.raises(RuntimeError, match="the event loop is broken"):
        await server.start()
    with pytest.raises(OSError):  # the port is free again
        await get(server)
    await server.close()


async def test_error_that_stops_the_server_is_raised_in_wait(monkeypatch):
    async with HttpServer(APP, "127.0.0.1", name="a page") as server:
        monkeypatch.setattr(server._server, "on_tick", _crash)  # called every 0.1 s
        with pytest.raises(RuntimeError, match="the event loop is broken"):
            await asyncio.wait_for(server.wait(), 60)
    with pytest.raises(OSError):  # it listens no longer
        await get(server)


async def test_cancelled_wait_does_not_stop_the_server():
    async with HttpServer(APP, "127.0.0.1", name="a page") as server:
        waiting = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await get(server)).endswith(b"hello")
