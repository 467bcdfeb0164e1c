"""HTTP server of the status address: read-only JSON about the run, and `POST /stop`, which stops it."""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ramify.processes.wire.browser_guard import BrowserGuard
from ramify.processes.wire.http_server import HttpServer

StatusHandler = Callable[[Request], Any]


def _respond(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def build_status_server(
    address: str, handlers: dict[str, StatusHandler], on_stop: Callable[[], None], *, allowed_hosts: Sequence[str] = ()
) -> HttpServer:
    """Build a server, not yet started, that answers GET requests with `handlers`, by path, as JSON.

    `POST /stop` calls `on_stop`; requests from web pages are rejected. Raises ConfigInvalid for a malformed address.
    """

    def make_route(path: str, handle: StatusHandler) -> Route:
        async def handler(request: Request) -> Response:
            return _respond(handle(request))

        return Route(path, handler, methods=["GET"])

    async def handle_stop(_: Request) -> Response:
        on_stop()
        return _respond({"stopping": True})

    routes = [make_route(path, handle) for path, handle in handlers.items()]
    app = Starlette(routes=[*routes, Route("/stop", handle_stop, methods=["POST"])])
    url = urlsplit(address)
    assert url.hostname is not None and url.port is not None  # the configuration was validated
    hosts = [url.hostname, *allowed_hosts]
    guarded = BrowserGuard(app, paths=["/stop"], hosts=hosts, config_key="orchestrator.allowed_hosts")
    return HttpServer(guarded, url.hostname, url.port, name="orchestrator.status_address")
