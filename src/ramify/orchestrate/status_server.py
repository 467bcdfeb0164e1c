"""The status address: what the run is doing, for people and their tools, and `/stop`, which ends it."""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ramify.errors import ConfigInvalid
from ramify.wire.browser_guard import BrowserGuard
from ramify.wire.http_server import HttpServer

StatusHandler = Callable[[Request], Any]


def build_status_server(
    address: str, handlers: dict[str, StatusHandler], on_stop: Callable[[], None], *, allowed_hosts: Sequence[str] = ()
) -> HttpServer:
    """A server, not yet started, that answers at `address` by path. `/stop` refuses web pages."""

    def make_route(path: str, handle: StatusHandler) -> Route:
        async def handler(request: Request) -> Response:
            return JSONResponse(handle(request))

        return Route(path, handler, methods=["GET"])

    async def handle_stop(_: Request) -> Response:
        on_stop()
        return JSONResponse({"stopping": True})

    routes = [make_route(path, answer) for path, answer in handlers.items()]
    app = Starlette(routes=[*routes, Route("/stop", handle_stop, methods=["POST"])])
    place = urlsplit(address)
    if place.hostname is None or place.port is None:
        raise ConfigInvalid(f"orchestrator.status: expected http://HOST:PORT, got {address}")
    hosts = [place.hostname, *allowed_hosts]
    guarded = BrowserGuard(app, paths=["/stop"], hosts=hosts, config_key="orchestrator.allowed_hosts")
    return HttpServer(guarded, place.hostname, place.port, name="orchestrator.status")
