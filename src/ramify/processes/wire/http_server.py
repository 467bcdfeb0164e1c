"""An HTTP server embedded in another process: it installs no signal handlers and stops only on `close`."""

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Generator
from typing import Self

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.core.async_calls import AsyncService
from ramify.core.errors import DeadlineExceeded, RequestInvalid
from ramify.processes.wire.listener import open_listener, to_bind_error

MAX_BODY_BYTES = 128 * 2**20  # of a decompressed body: images in base64, and the history
PIECE_BYTES = 2**18
GZIP_WINDOW = 16 + zlib.MAX_WBITS  # with the header of gzip
KEEP_ALIVE_TIMEOUT = 120  # seconds an idle connection stays open; longer than in the clients' connection pools
BACKLOG = 2048  # connections that may wait to be accepted
START_TIMEOUT = 10.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds to stop, in addition to `shutdown_timeout`
POLL_INTERVAL = 0.005


class CompressedBodies:
    """ASGI middleware that decompresses the bodies of requests. The application gets RequestInvalid as it reads one.

    A body is decompressed piece by piece, so a small one that becomes huge is refused before it is in memory.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a body that is not compressed."""
        headers: dict[bytes, bytes] = dict(scope["headers"]) if scope["type"] == "http" else {}
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            receive = _GzipReader(receive, encoding.decode("latin-1"))
        await self._app(scope, receive, send)


class _GzipReader:
    """Receives the messages of a request with their bodies decompressed; a call returns at most PIECE_BYTES."""

    def __init__(self, receive: Receive, encoding: str) -> None:
        self._receive, self._encoding = receive, encoding
        self._decompressor = zlib.decompressobj(GZIP_WINDOW)
        self._has_more_output, self._has_more_input = False, True
        self._num_bytes = 0

    async def __call__(self) -> Message:
        if self._encoding not in ("gzip", "x-gzip"):
            raise RequestInvalid(f"content-encoding: expected gzip or none, found {self._encoding!r:.80}")
        data = self._decompressor.unconsumed_tail
        if not self._has_more_output:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data, self._has_more_input = message.get("body", b""), bool(message.get("more_body"))
        piece = self._decompress(data)
        return {
            "type": "http.request",
            "body": piece,
            "more_body": self._has_more_input or self._has_more_output,
        }

    def _decompress(self, data: bytes) -> bytes:
        try:
            piece = self._decompressor.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise RequestInvalid(f"the body is not valid gzip: {error}") from error
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_BODY_BYTES:
            raise RequestInvalid(f"the decompressed body is larger than {MAX_BODY_BYTES} bytes; send a smaller one")
        self._has_more_output = len(piece) == PIECE_BYTES
        return piece


class HttpServer(AsyncService):
    """Serve an ASGI app on `host` and `port` (0: any free port) between `start` and `close`, or in `async with`.

    `name` labels the server in error messages. On `close`, requests in flight get `shutdown_timeout` seconds.
    """

    def __init__(self, app: ASGIApp, host: str, port: int = 0, *, name: str, shutdown_timeout: float = 2.0) -> None:
        self.host, self.port, self.name, self.shutdown_timeout = host, port, name, shutdown_timeout
        settings = uvicorn.Config(
            CompressedBodies(app),
            log_config=None,  # the process configures logging
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",  # bounds the size of a request's head; the alternative, httptools, does not
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
        )
        self._server = _NoSignalServer(settings)
        self._server.servers = []  # uvicorn adds to them when it starts
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The server's URL; after `start`, with the actual port."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def start(self) -> Self:
        """Listen and serve.

        Raises PortTaken if the port is in use, ConfigInvalid if this machine does not have the address,
        DeadlineExceeded if the server does not start in time, and any other error with which it ends instead.
        """
        try:
            listener = open_listener(self.host, self.port, backlog=BACKLOG)
        except OSError as error:
            reason = f"{error.strerror}; 0 takes a free one"
            raise to_bind_error(self.name, f"{self.host}:{self.port}", error.errno, reason) from error
        # Connections inherit this option; asyncio sets it only on sockets created with an explicit protocol number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        self._task = task = asyncio.create_task(self._server.serve(sockets=[listener]), name=self.name)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not self._server.started and not task.done():
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError as error:
            await self.close()
            raise DeadlineExceeded(f"{self.name}: waited {START_TIMEOUT:g} s for {self.address} to answer") from error
        if task.done():
            await self.close()
            listener.close()
            task.result()
        return self

    async def wait(self) -> None:
        """Return when the server has stopped. Raises the error that stopped it, if any."""
        task = self._task
        assert task is not None
        await asyncio.wait({task})  # `await task` would cancel the server with the waiter
        task.result()

    async def close(self) -> None:
        """Stop the server. Closing it again does nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({task}, timeout=self.shutdown_timeout + CLOSE_TIMEOUT)
        if not done:
            task.cancel()
            await asyncio.wait({task})
        for server in self._server.servers:  # after an error, uvicorn leaves them open
            server.close()


class _NoSignalServer(uvicorn.Server):
    """A uvicorn server without signal handlers: uvicorn's would end the process before its owner has cleaned up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
