"""Forward connections from a listening socket to one address of this machine.

A sandbox has a network of its own, with a single listening socket that the host holds. What a program sends there
reaches the gateway of its rollout, and nothing else is reachable. The connections of a sandbox are counted here,
because the gateway does not know whose they are until they have sent a complete head with a secret.
"""

import asyncio
import contextlib
import socket

CHUNK = 1 << 16
CONNECT_TIMEOUT = 10.0  # seconds
MAX_CONNECTIONS = 128  # at once; each is two open files and up to half a MiB of buffers, here and in the gateway


class PortForward:
    """Forwards the connections of a listening socket to `host`:`port`, until `close`.

    Connections beyond `MAX_CONNECTIONS` at once are closed.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections. The socket is closed by `close`."""
        self._server = await asyncio.start_server(self._handle, sock=listener)

    async def close(self) -> None:
        """Close the listening socket and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(writer):
            if len(self._tasks) >= MAX_CONNECTIONS:
                return
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
                with contextlib.closing(target_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_copy(reader, target_writer))
                        group.create_task(_copy(target_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the stream, and pass the end on. It waits as long as the rollout lives."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
