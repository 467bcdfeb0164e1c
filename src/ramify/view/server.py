"""The HTTP server of the page: JSON for each query, and the files of the page.

Queries read files, so they run in threads. The parameters of a request are checked here; what a query refuses is
answered with the name and the message of the failure.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import secrets
import threading
import webbrowser
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, RamifyError, RunDamaged
from ramify.processes.wire.browser_guard import BrowserGuard
from ramify.processes.wire.http_server import HttpServer
from ramify.view.queries import RunQueries
from ramify.view.rollout_filter import RolloutFilter

# Who may read the page: it shows what models wrote and how a run is configured.
#
# The page is bound to the loopback address unless the user says otherwise. If other machines can reach it, directly or
# through a proxy, every request needs a token, which the printed address contains. The browser gets it as a cookie, so
# that it is in no link that is copied. `BrowserGuard` refuses other web pages. The headers let the page load nothing
# but its own files, and let no other page embed it.

COOKIE_PREFIX = "ramify_token_"  # with the port: browsers send the cookies of a host to all of its ports
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


class AccessControl:
    """ASGI middleware that adds the headers, and refuses requests without the `token`, if there is one."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._token is None:
            await self._app(scope, receive, send_with_headers)
            return
        request, cookie = Request(scope), f"{COOKIE_PREFIX}{_get_port(scope)}"
        if self._matches(request.query_params.get("token")):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send_with_headers)
        elif self._matches(request.cookies.get(cookie)):
            await self._app(scope, receive, send_with_headers)
        else:
            text = "This page needs its token: open the address that 'ramify view' printed.\n"
            await PlainTextResponse(text, 401)(scope, receive, send_with_headers)

    def _matches(self, value: str | None) -> bool:
        return value is not None and hmac.compare_digest(value.encode(), (self._token or "").encode())


def _get_port(scope: Scope) -> int:
    """Return the port that the server listens on."""
    server = scope.get("server")
    return server[1] if server else 0


STATIC_DIR = Path(__file__).parent / "static"
MAX_CHUNK_CHARS = 200_000  # of one message in one answer

MAX_NUMBER = 2**53 - 1  # in a parameter: the largest that is exact in JavaScript, and far from the limits of SQLite

JsonQuery = Callable[[QueryParams], Any]
BuildResponse = Callable[[QueryParams], Response]

_logger = logging.getLogger("ramify.view")


def build_app(queries: RunQueries, *, token: str | None = None, hosts: tuple[str, ...] = ()) -> ASGIApp:
    """Return the page as an ASGI app. Requests need the `token`, if there is one; `hosts` are names of the server."""
    builders: dict[str, BuildResponse] = {
        **{path: partial(_build_json, query) for path, query in build_queries(queries).items()},
        "/api/media": partial(_build_image, queries),
        "/api/file": partial(_build_file, queries),
    }
    routes = [Route(path, partial(_answer, builder)) for path, builder in builders.items()]
    static = StaticFiles(directory=STATIC_DIR)
    app = Starlette(routes=[*routes, Route("/", _send_page), Mount("/static", static)])
    return BrowserGuard(AccessControl(app, token), paths=None, hosts=hosts, config_key="--allow-host")


def build_queries(queries: RunQueries) -> Mapping[str, JsonQuery]:
    """Return the queries that are answered with JSON, by path."""
    return {
        "/api/runs": lambda _: queries.list_runs(),
        "/api/run": lambda params: queries.get_run(_require(params, "run")),
        "/api/config": lambda params: queries.get_config(_require(params, "run")),
        "/api/metrics": lambda params: queries.get_metrics(
            _require(params, "run"), params.getlist("name"), _parse_int(params, "after") or 0
        ),
        "/api/rollouts": lambda params: queries.list_rollouts(
            _require(params, "run"),
            _parse_filter(params),
            sort=params.get("sort", "newest"),
            descending=params.get("order", "desc") == "desc",
            page=_parse_int(params, "page") or 1,
        ),
        "/api/excerpts": lambda params: queries.get_excerpts(_require(params, "run"), params.getlist("id")),
        "/api/rollout": lambda params: queries.get_rollout(_require(params, "run"), _require(params, "id")),
        "/api/tokens": lambda params: queries.get_tokens(
            _require(params, "run"),
            _require(params, "id"),
            _parse_int(params, "trace") or 0,
            _parse_ints(params, "node"),
        ),
        "/api/message": lambda params: queries.get_message(
            _require(params, "run"),
            _require(params, "id"),
            _parse_int(params, "trace") or 0,
            _parse_int(params, "node") or 0,
            max(0, _parse_int(params, "start") or 0),
            MAX_CHUNK_CHARS,
        ),
        "/api/group": lambda params: queries.get_group(_require(params, "run"), *_parse_group(params)),
        "/api/forest": lambda params: queries.get_forest(_require(params, "run"), *_parse_group(params)),
    }


async def _answer(build_response: BuildResponse, request: Request) -> Response:
    """Build a response in a thread; answer a failure with its name and message."""
    try:
        return await run_in_threadpool(build_response, request.query_params)
    except _InvalidParameter as error:
        return _json({"name": ConfigInvalid.__name__, "message": str(error)}, 400)
    except ConfigInvalid as error:
        return _json({"name": error.name, "message": error.message}, 404)
    except RamifyError as error:
        return _json({"name": error.name, "message": error.message}, 500)
    except msgspec.MsgspecError as error:
        message = f"a record of the run cannot be decoded: {error}; 'ramify why RUN --audit' checks the run"
        return _json({"name": RunDamaged.__name__, "message": message}, 500)
    except Exception as error:
        _logger.exception("request failed: %s", request.url.path)
        return _json({"name": type(error).__name__, "message": f"unexpected error: {error}"}, 500)


async def _send_page(_: Request) -> Response:
    return Response((STATIC_DIR / "index.html").read_bytes(), media_type="text/html")


def _build_json(query: JsonQuery, params: QueryParams) -> Response:
    return _json(query(params))


def _build_image(queries: RunQueries, params: QueryParams) -> Response:
    """Return an image. The type is one of a few that cannot hold scripts."""
    run, id, hash = (_require(params, name) for name in ("run", "id", "hash"))
    mime, data = queries.get_media(run, id, hash)
    return Response(data, media_type=mime, headers={"content-security-policy": "default-src 'none'; sandbox"})


def _build_file(queries: RunQueries, params: QueryParams) -> Response:
    """Return a rollout as a file to save."""
    run, id = _require(params, "run"), _require(params, "id")
    format = "md" if params.get("format") == "md" else "json"
    text = queries.export_rollout(run, id, format)
    name = re.sub(r"[^\w.-]", "-", id, flags=re.ASCII)
    headers = {"content-disposition": f'attachment; filename="rollout-{name}.{format}"'}
    mime = "text/markdown" if format == "md" else "application/json"
    return Response(text.encode("utf-8", "backslashreplace"), media_type=mime, headers=headers)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


class _InvalidParameter(Exception):
    """A parameter of a request is missing, or has no valid value."""


def _require(params: QueryParams, name: str) -> str:
    if name not in params:
        raise _InvalidParameter(f"the request needs the parameter {name!r}")
    return params[name]


def _parse_int(params: QueryParams, name: str) -> int | None:
    value = params.get(name)
    return _to_int(name, value) if value else None


def _parse_ints(params: QueryParams, name: str) -> list[int]:
    return [_to_int(name, value) for value in params.getlist(name)]


def _to_int(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise _InvalidParameter(f"{name}: expected a number, got {value!r}") from None
    if abs(number) > MAX_NUMBER:
        raise _InvalidParameter(f"{name}: expected a number of at most {MAX_NUMBER}, got {value}")
    return number


def _parse_float(params: QueryParams, name: str) -> float | None:
    value = params.get(name)
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise _InvalidParameter(f"{name}: expected a number, got {value!r}") from None


def _parse_group(params: QueryParams) -> tuple[int | None, str, str]:
    return _parse_int(params, "group"), params.get("source", ""), params.get("task", "")


def _parse_filter(params: QueryParams) -> RolloutFilter:
    texts = {name: params[name] for name in ("source", "stop", "error", "state", "text") if params.get(name)}
    return RolloutFilter(
        **texts,
        step=_parse_int(params, "step"),
        group=_parse_int(params, "group"),
        min_reward=_parse_float(params, "min_reward"),
        max_reward=_parse_float(params, "max_reward"),
    )


START_TIMEOUT = 20.0  # seconds, for the thread
STOP_TIMEOUT = 10.0


async def serve_page(
    folder: Path,
    stop: asyncio.Event,
    on_address: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve the runs in a folder until `stop` is set; `on_address` gets the address, with the token if one is needed.

    `allowed_hosts` are the names under which proxies serve the page.

    Raises PortTaken if the port is in use, and ConfigInvalid if this machine does not have the address.
    """
    token = None if is_loopback(host) and not allowed_hosts else make_token()
    with contextlib.closing(RunQueries(folder)) as queries:
        app = build_app(queries, token=token, hosts=tuple(allowed_hosts))
        async with HttpServer(app, host, port, name="--port") as server:
            on_address(server.address + (f"/?token={token}" if token else ""))
            await stop.wait()


@contextlib.contextmanager
def serve_in_thread(folder: Path) -> Generator[str]:
    """Serve the runs in a folder at a free port of the loopback address while the block runs; yield the address.

    Raises DeadlineExceeded if the server does not start in time; it then stops as soon as it has started.
    """
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def announce(address: str) -> None:
            try:
                started.set_result((address, loop, stop))
            except InvalidStateError:  # cancelled: nobody waits for the page any more
                stop.set()

        await serve_page(folder, stop, announce)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="view", daemon=True)
    thread.start()
    wait({started}, START_TIMEOUT)
    if started.cancel():
        raise DeadlineExceeded(f"waited {START_TIMEOUT:g} s for the page of {folder} to be served")
    address, loop, stop = started.result()
    try:
        yield address
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended already
            loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_TIMEOUT)


def open_browser(address: str) -> None:
    """Open the address in a browser, without waiting for it."""
    threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
