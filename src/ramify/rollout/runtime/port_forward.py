"""Forward connections from a listening socket to one address of this machine.

A sandbox has a network of its own, with a single listening socket that the host holds. What a program sends there
reaches the gateway of its rollout, and nothing else is reachable. The connections of a sandbox are counted here,
because the gateway does not know whose they are until they have sent a complete head with a secret. So are the bytes
that it sends: an agent that sends as fast as it can would use all the time of the process that forwards them.
"""

import asyncio
import contextlib
import socket
import time

from ramify.core.async_calls import cancel_all

CHUNK = 1 << 16
CONNECT_TIMEOUT = 10.0  # seconds
MAX_CONNECTIONS = 128  # at once; each is two open files and up to half a MiB of buffers, here and in the gateway
BYTES_PER_SECOND = 4 << 20  # from a sandbox, in the long run
BURST_BYTES = 16 << 20  # after a pause: a long conversation with images


class PortForward:
    """Forwards the connections of a listening socket to `host`:`port`, until `close`.

    Connections beyond `MAX_CONNECTIONS` at once are closed. What they send together beyond `bytes_per_second` waits.
    """

    def __init__(
        self, host: str, port: int, *, bytes_per_second: float = BYTES_PER_SECOND, burst_bytes: int = BURST_BYTES
    ) -> None:
        self._host, self._port = host, port
        self._rate_limit = _RateLimit(bytes_per_second, burst_bytes)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections. The socket is closed by `close`."""
        self._server = await asyncio.start_server(self._handle, sock=listener)

    async def close(self) -> None:
        """Close the listening socket and all connections."""
        if self._server is not None:
            self._server.close()
        await cancel_all(self._tasks)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(writer):
            if len(self._tasks) >= MAX_CONNECTIONS:
                return
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):  # only `close` cancels it
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    target_reader, target_writer = await self._open_target(reader, writer)
                with contextlib.closing(target_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_copy(reader, target_writer, self._rate_limit))
                        group.create_task(_copy(target_reader, writer))

    async def _open_target(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the target of an accepted connection. Raises OSError if there is none."""
        return await asyncio.open_connection(self._host, self._port)


class _RateLimit:
    """The bytes that all connections of a sandbox together may send."""

    def __init__(self, bytes_per_second: float, burst_bytes: int) -> None:
        self._bytes_per_second, self._burst_bytes = bytes_per_second, burst_bytes
        self._available, self._updated_at = float(burst_bytes), time.monotonic()

    async def spend(self, num_bytes: int) -> None:
        """Count bytes that were sent, and wait while there are too many."""
        now = time.monotonic()
        earned = self._bytes_per_second * (now - self._updated_at)
        self._available, self._updated_at = min(self._burst_bytes, self._available + earned) - num_bytes, now
        if self._available < 0:
            await asyncio.sleep(-self._available / self._bytes_per_second)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate_limit: _RateLimit | None = None
) -> None:
    """Copy until the end of the stream, and pass the end on. It waits as long as the rollout lives."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
            if rate_limit is not None:
                await rate_limit.spend(len(data))
        writer.write_eof()
