"""An HTTP server in a process that has more to do: it leaves signals alone, and ends when it is told to."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from ramify.errors import DeadlineExceeded
from ramify.wire.listener import open_listener, to_bind_error

KEEP_ALIVE_TIMEOUT = 120  # seconds an idle connection stays open; clients that pool connections give up on one earlier
BACKLOG = 2048  # connections that may wait to be taken
START_TIMEOUT = 10.0  # seconds until it has to answer
CLOSE_TIMEOUT = 5.0  # seconds it gets to end beyond what its requests get
POLL_INTERVAL = 0.005


class HttpServer:
    """`app` at an address; `start` and `close` (or `async with`) are its life. `what` names it where it cannot listen.

    Requests in flight get `shutdown` seconds when it closes.
    """

    def __init__(self, app: ASGIApp, host: str, port: int = 0, *, name: str, shutdown_timeout: float = 2.0) -> None:
        self.host, self.port, self.name, self.shutdown_timeout = host, port, name, shutdown_timeout
        settings = uvicorn.Config(
            app,
            log_config=None,  # logging is the process's own
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
        )
        self._server = _NoSignalServer(settings)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens; the real one once it has started."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> Self:
        """Listen. Raises PortTaken, ConfigInvalid for an address that cannot be ours, or DeadlineExceeded."""
        try:
            listener = open_listener(self.host, self.port, backlog=BACKLOG)
        except OSError as error:
            why = f"{error.strerror}; 0 takes a free one"
            raise to_bind_error(self.name, f"{self.host}:{self.port}", error.errno, why) from error
        # connections inherit it; asyncio sets it only on sockets that were made with the protocol's number
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=self.name)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not self._server.started and not self._task.done():
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError as error:
            await self.close()
            raise DeadlineExceeded(f"{self.name}: waited {START_TIMEOUT:g} s for {self.address} to answer") from error
        return self

    async def wait(self) -> None:
        """Returns when it has ended."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def close(self) -> None:
        """End it. A second time does nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({task}, timeout=self.shutdown_timeout + CLOSE_TIMEOUT)
        if not done:
            task.cancel()
            await asyncio.wait({task})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _NoSignalServer(uvicorn.Server):
    """Leaves the process's signals alone: uvicorn would raise them again, and end the process before its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
