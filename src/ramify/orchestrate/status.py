"""The status address: what the run is doing, for people and their tools. It only reads."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ramify.errors import ConfigInvalid, PortTaken

Answer = Callable[[Request], Any]


class _Server(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def status_server(address: str, answers: dict[str, Answer], stop: Callable[[], None]) -> AsyncIterator[str]:
    """Answers at `address` by path; yields the real address."""

    def route(path: str, answer: Answer) -> Route:
        async def handler(request: Request) -> Response:
            return JSONResponse(answer(request))

        return Route(path, handler, methods=["GET"])

    async def stopping(_: Request) -> Response:
        stop()
        return JSONResponse({"stopping": True})

    routes = [route(path, answer) for path, answer in answers.items()]
    app = Starlette(routes=[*routes, Route("/stop", stopping, methods=["POST"])])
    place = urlsplit(address)
    if place.hostname is None or place.port is None:
        raise ConfigInvalid(f"orchestrator.status: expected http://HOST:PORT, got {address}")
    try:
        listener = socket.create_server((place.hostname, place.port))
    except OSError as error:
        raise PortTaken(f"orchestrator.status: {address} cannot be listened on: {error.strerror}") from error
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="status")
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        yield f"http://{place.hostname}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
