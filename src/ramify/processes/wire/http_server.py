"""An HTTP server embedded in another process: it installs no signal handlers and stops only on `close`."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from ramify.core.errors import DeadlineExceeded
from ramify.processes.wire.compressed_bodies import CompressedBodies
from ramify.processes.wire.lifecycle import AsyncService
from ramify.processes.wire.listener import open_listener, to_bind_error

KEEP_ALIVE_TIMEOUT = 120  # seconds an idle connection stays open; longer than in the clients' connection pools
BACKLOG = 2048  # connections that may wait to be accepted
START_TIMEOUT = 10.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds to stop, in addition to `shutdown_timeout`
POLL_INTERVAL = 0.005


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

        Raises PortTaken if the port is in use, ConfigInvalid if the host is no address of this machine,
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
