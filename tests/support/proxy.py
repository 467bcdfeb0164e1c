"""A TCP proxy whose connections can be cut or silenced."""

import asyncio
import contextlib


class Proxy:
    """Forwards connections to `target`; with `silent`, it drops what it receives."""

    def __init__(self, address: str) -> None:
        self.target = address
        self._writers: set[asyncio.StreamWriter] = set()
        self.silent = False
        self.connections = 0

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            host, _, port = self.target.removeprefix("tcp://").rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers |= {writer, far_writer}
            try:
                await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
            finally:
                for side in (writer, far_writer):
                    self._writers.discard(side)
                    side.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.silent:
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
