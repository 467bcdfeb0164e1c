"""Forwarded connections: bounded in number, and closed with the forward."""

import asyncio
import contextlib
import socket

from ramify.rollout.runtime import port_forward
from ramify.rollout.runtime.port_forward import PortForward


def run_with_forward(test, target_port: int):
    """Run `test(forward, port)` with a started forward to a port of this machine."""

    async def run():
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        forward = PortForward("127.0.0.1", target_port)
        await forward.start(listener)
        try:
            await test(forward, listener.getsockname()[1])
        finally:
            await forward.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_connection_is_closed_if_the_forward_ends_while_it_connects():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as target, contextlib.ExitStack() as full:
        address = target.getsockname()
        for _ in range(3):  # nobody accepts: further connections wait
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)

        async def test(forward, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while not forward._tasks:
                await asyncio.sleep(0)
            await forward.close()
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

        run_with_forward(test, address[1])


async def test_connections_beyond_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr(port_forward, "MAX_CONNECTIONS", 2)

    async def echo(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        await reader.read()
        writer.close()

    async def ask(reader, writer) -> bytes:
        with contextlib.suppress(ConnectionError):
            writer.write(b"hello\n")
            return await asyncio.wait_for(reader.readline(), 60)
        return b""

    async with asyncio.timeout(60):
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        forward = PortForward("127.0.0.1", server.sockets[0].getsockname()[1])
        await forward.start(listener)
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert [await ask(*stream) for stream in streams] == [b"hello\n", b"hello\n", b""]
        streams[0][1].close()
        while len(forward._tasks) > 1:
            await asyncio.sleep(0.01)
        streams.append(await asyncio.open_connection("127.0.0.1", port))
        assert await ask(*streams[-1]) == b"hello\n"
        for _, writer in streams:
            writer.close()
        await forward.close()
        server.close()


async def test_bytes_of_all_connections_beyond_the_limit_wait():
    received = 0

    async def count(reader, writer):
        nonlocal received
        while data := await reader.read(1 << 16):
            received += len(data)
        writer.close()

    async def test(port):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in connections:
            writer.write(bytes(1 << 22))
        while received < 1 << 20:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert received <= (1 << 20) + len(connections) * port_forward.CHUNK
        for _, writer in connections:
            writer.close()

    async with asyncio.timeout(60):
        target = await asyncio.start_server(count, "127.0.0.1", 0)
        listener = socket.create_server(("127.0.0.1", 0))
        forward = PortForward(*target.sockets[0].getsockname(), bytes_per_second=1.0, burst_bytes=1 << 20)
        await forward.start(listener)
        try:
            await test(listener.getsockname()[1])
        finally:
            await forward.close()
            target.close()
