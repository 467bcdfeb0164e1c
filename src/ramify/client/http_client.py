"""HTTP requests to one server: a connection pool, and the errors that a request can end with.

What matters about a failure is whether the server may have started to sample. If the connection was never made
(`ConnectFailed`) or the server refused the request (`ServerBusy`), it can be sent again. If the connection broke later
(`ResponseLost`), a sample may exist that is lost, and drawing another one silently would favour short samples, which
are lost less often. Every other failure is a RamifyError.
"""

import asyncio
import re
import socket
import ssl
import time
from collections import deque
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from ramify.client.http_connection import ConnectionBroken, HttpConnection, HttpResponse
from ramify.client.loop_pacer import LoopPacer
from ramify.errors import (
    ContextOverflow,
    DeadlineExceeded,
    OriginRefused,
    ProviderError,
    QueueFull,
    RamifyError,
    RequestInvalid,
    WeightsRefused,
)

MAX_EXCERPT_CHARS = 300  # of a body in an error message
KEEPALIVE_EXPIRY = 2.0  # below uvicorn's 5 s: a connection must not be used while the server closes it for being idle
FAILURES_BY_NAME: dict[str, type[RamifyError]] = {
    cls.name: cls
    for cls in (ContextOverflow, DeadlineExceeded, OriginRefused, QueueFull, RequestInvalid, WeightsRefused)
}
CONTEXT_OVERFLOW_RE = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)


class RequestFailed(Exception):
    """Base of the failures after which a request may be sent again under some condition."""


class ConnectFailed(RequestFailed):
    """The request never reached the server."""


class ServerBusy(RequestFailed):
    """The server refused the request with status 503.

    `retry_after` is its Retry-After header in seconds, `error` the failure to raise when there are no retries left.
    """

    def __init__(self, error: RamifyError, retry_after: float | None) -> None:
        super().__init__(error.message)
        self.error, self.retry_after = error, retry_after


class ResponseLost(RequestFailed):
    """The connection broke after the request was sent; the server may have sampled."""


class HttpConnectionPool:
    """The connections to one server, opened on demand in the running event loop.

    Opening a connection may take `connect_timeout` seconds. Waiting for a response is not limited here: every caller
    has a timeout. `headers` are sent with every request; `pacer` limits how many responses are handled per loop
    iteration.
    """

    def __init__(self, url: str, *, connect_timeout: float, max_connections: int) -> None:
        self.base_url = url
        self.headers: dict[str, str] = {}
        self.pacer = LoopPacer()
        self._url_parts = urlsplit(url)
        self._connect_timeout, self._slots = connect_timeout, asyncio.Semaphore(max_connections)
        self._connections: set[HttpConnection] = set()
        self._idle: deque[tuple[float, HttpConnection]] = deque()  # (idle since, connection), the oldest first
        self._closed = False

    async def aclose(self) -> None:
        """Close all connections; later requests raise ConnectFailed."""
        self._closed = True
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # lets requests in flight fail now

    async def request(self, method: str, path: str, body: bytes | None = None) -> HttpResponse:
        """Send one request and wait for its response. Raises ConnectFailed or ResponseLost."""
        request = self._encode_request(method, path, body)
        async with self._slots:
            connection = self._take_idle() or await self._open_connection()
            try:
                return await connection.send(request)
            except ConnectionBroken as error:
                raise ResponseLost(f"{self.base_url}: {error}") from error
            finally:
                self._release(connection)

    def _encode_request(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Host": self._url_parts.netloc.rpartition("@")[2], **self.headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if method != "GET":
            headers["Content-Length"] = str(len(body or b""))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers):
            raise RequestInvalid(f"{self.base_url}: a header (perhaps the API key) holds a line break")
        return f"{method} {self._url_parts.path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")

    def _take_idle(self) -> HttpConnection | None:
        """Return the most recently used idle connection, so that surplus ones reach their keep-alive limit."""
        if self._closed:
            raise ConnectFailed(f"{self.base_url}: the client is closed")
        expired_before = time.monotonic() - KEEPALIVE_EXPIRY
        while self._idle and (self._idle[0][0] < expired_before or self._idle[0][1].is_closed):
            _, connection = self._idle.popleft()
            connection.close()
            self._connections.discard(connection)
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
            self._connections.discard(connection)
        return None

    def _release(self, connection: HttpConnection) -> None:
        if connection.is_closed:
            self._connections.discard(connection)
        else:
            self._idle.append((time.monotonic(), connection))

    async def _open_connection(self) -> HttpConnection:
        host, secure = self._url_parts.hostname, self._url_parts.scheme == "https"
        if host is None or self._url_parts.scheme not in ("http", "https"):
            raise ConnectFailed(f"{self.base_url!r} is not an address; expected http://host:port")
        try:
            async with asyncio.timeout(self._connect_timeout):
                transport, connection = await asyncio.get_running_loop().create_connection(
                    HttpConnection,
                    host,
                    self._url_parts.port or (443 if secure else 80),
                    ssl=default_ssl_context() if secure else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(
                f"{self.base_url} cannot be reached: no connection within {self._connect_timeout:g} s"
            ) from error
        except OSError as error:
            raise ConnectFailed(f"{self.base_url} cannot be reached: {error}") from error
        _enable_keepalive(transport.get_extra_info("socket"))
        self._connections.add(connection)
        return connection


@lru_cache(maxsize=1)
def default_ssl_context() -> ssl.SSLContext:
    """Return the system's default context, cached because loading its certificates is slow."""
    return ssl.create_default_context()


def _enable_keepalive(sock: socket.socket) -> None:
    """Detect within a minute that the other host is gone; otherwise a read would wait for the caller's timeout."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


async def send_request(http: HttpConnectionPool, method: str, path: str, body: Any = None, **query: str) -> bytes:
    """Send one request with a JSON body and return the body of its response.

    Raises RequestFailed, or the RamifyError that a status other than 200 means.
    """
    content = None if body is None else msgspec.json.encode(body)
    response = await http.request(method, f"{path}?{urlencode(query)}" if query else path, content)
    await http.pacer.wait_turn()  # handling a response takes CPU: decoding, recording, rendering the next prompt
    return read_body(http, path, response)


def read_body(http: HttpConnectionPool, path: str, response: HttpResponse) -> bytes:
    """Return the body of a response with status 200; raise the failure that any other status means."""
    if response.status != 200:
        raise error_from_response(http, path, response)
    return response.body


def error_from_response(http: HttpConnectionPool, path: str, response: HttpResponse) -> Exception:
    """Return the failure that a response with a status other than 200 means."""
    name, message = _parse_error_body(response.body.decode("utf-8", "replace"))
    status = response.status
    error: RamifyError
    if name in FAILURES_BY_NAME:
        error = FAILURES_BY_NAME[name](message)
    elif status == 400 and CONTEXT_OVERFLOW_RE.search(message):
        error = ContextOverflow(message)
    elif status in (400, 422):
        error = RequestInvalid(f"{http.base_url}{path} returned status {status}: {message}")
    else:
        error = ProviderError(f"{http.base_url}{path} returned status {status}: {message}")
    return ServerBusy(error, _parse_retry_after(response.headers.get("retry-after"))) if status == 503 else error


def _parse_error_body(text: str) -> tuple[str | None, str]:
    """Return the failure name and the message in an error body in OpenAI's format."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error.get("type")), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None, text[:MAX_EXCERPT_CHARS] or "(no body)"


def _parse_retry_after(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # an HTTP date is ignored
