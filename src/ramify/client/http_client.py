"""One HTTP exchange with one server, and what each way to fail means for the request.

What matters about a failure is whether the server can have begun to sample. If the connection was never made (`Unsent`)
or the server refused before doing anything (`Busy`), sending the request again is free. If the connection broke later
(`Lost`), a sample may exist that nobody will see, and drawing another one silently would favour the short ones, which
are lost less often. Everything else is an answer, and has a name.
"""

import asyncio
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
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

MAX_EXCERPT_CHARS = 300  # characters of a body that are shown
# Below uvicorn's 5 s: a connection must not be used at the moment the server closes it for being idle.
KEEPALIVE_EXPIRY = 2.0
FAILURES_BY_NAME: dict[str, type[RamifyError]] = {
    cls.name: cls
    for cls in (ContextOverflow, DeadlineExceeded, OriginRefused, QueueFull, RequestInvalid, WeightsRefused)
}
CONTEXT_OVERFLOW_RE = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)


class ConnectFailed(Exception):
    """The request never reached the server."""


class ServerBusy(Exception):
    """The server refused with 503 before doing anything. `wait` is its Retry-After, `error` what to give up with."""

    def __init__(self, error: RamifyError, retry_after: float | None) -> None:
        super().__init__(error.message)
        self.error, self.retry_after = error, retry_after


class ResponseLost(Exception):
    """The connection broke after the request was sent; it may have been sampled."""


class HttpConnectionPool:
    """The connections to one server, opened as they are needed inside the loop that asks.

    Waiting for an answer has no limit of its own: every caller has a deadline.
    """

    def __init__(self, url: str, *, connect_timeout: float, max_connections: int) -> None:
        self.base_url = url
        self.headers: dict[str, str] = {}
        self.pacer = LoopPacer()
        self._url_parts = urlsplit(url)
        self._connect_timeout, self._slots = connect_timeout, asyncio.Semaphore(max_connections)
        self._connections: set[HttpConnection] = set()
        self._idle: deque[tuple[float, HttpConnection]] = deque()  # since when, the longest first
        self._closed = False

    async def aclose(self) -> None:
        """End them, for good."""
        self._closed = True
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # so that those who wait hear of it

    async def request(self, method: str, path: str, body: bytes | None = None) -> HttpResponse:
        """Send one request and wait for its answer; Unsent and Lost say what went wrong on the way."""
        request = self._encode_request(method, path, body)
        async with self._slots:
            connection = self._take_idle() or await self._open_connection()
            try:
                answer = await connection.send(request)
            except ConnectionBroken as error:
                raise ResponseLost(f"{self.base_url}: {error}") from error
            finally:
                self._release(connection)
        return answer

    def _encode_request(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Host": self._url_parts.netloc.rpartition("@")[2], **self.headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if method != "GET":
            headers["Content-Length"] = str(len(body or b""))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers):
            raise RequestInvalid(f"{self.base_url}: a header (an API key, perhaps) holds a line break")
        return f"{method} {self._url_parts.path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")

    def _take_idle(self) -> HttpConnection | None:
        """A connection that is open already: the one used last, so that those too many get old."""
        if self._closed:
            raise ConnectFailed(f"{self.base_url}: the client is closed")
        oldest = time.monotonic() - KEEPALIVE_EXPIRY
        while self._idle and (self._idle[0][0] < oldest or self._idle[0][1].is_closed):
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
            raise ConnectFailed(f"{self.base_url!r} is no address; expected http://host:port")
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


def open_client(url: str, *, connect_timeout: float, max_connections: int) -> HttpConnectionPool:
    """The connections to one server; opening one may take `connect` seconds."""
    return HttpConnectionPool(url, connect_timeout=connect_timeout, max_connections=max_connections)


@lru_cache(maxsize=1)
def default_ssl_context() -> ssl.SSLContext:
    """What an https server must show: read once, it takes a while."""
    return ssl.create_default_context()


def _enable_keepalive(sock: socket.socket) -> None:
    """Notice within a minute that the other host is gone; without that a read waits for its deadline."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


async def send_request(http: HttpConnectionPool, method: str, path: str, body: Any = None, **query: str) -> bytes:
    """Send one request and return the body of its answer, or raise what went wrong."""
    content = None if body is None else msgspec.json.encode(body)
    answer = await http.request(method, f"{path}?{urlencode(query)}" if query else path, content)
    await http.pacer.wait_turn()  # what follows an answer is work: reading it, recording it, the next prompt
    return read_body(http, path, answer)


def read_body(http: HttpConnectionPool, path: str, response: HttpResponse) -> bytes:
    """Return the body of an answer with status 200; raise what any other status means."""
    if response.status != 200:
        raise error_from_response(
            http, path, response.status, response.headers, response.body.decode("utf-8", "replace")
        )
    return response.body


def error_from_response(
    http: HttpConnectionPool, path: str, status: int, headers: Mapping[str, str], text: str
) -> Exception:
    """What a status other than 200 means."""
    name, message = _parse_error_body(text)
    error: RamifyError
    if name in FAILURES_BY_NAME:
        error = FAILURES_BY_NAME[name](message)
    elif status == 400 and CONTEXT_OVERFLOW_RE.search(message):
        error = ContextOverflow(message)
    elif status in (400, 422):
        error = RequestInvalid(f"{http.base_url}{path} answered {status}: {message}")
    else:
        error = ProviderError(f"{http.base_url}{path} answered {status}: {message}")
    return ServerBusy(error, _parse_retry_after(headers.get("retry-after"))) if status == 503 else error


def _parse_error_body(text: str) -> tuple[str | None, str]:
    """The name and the message in the body of a refusal, as OpenAI-shaped servers write them."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error.get("type")), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None, text[:MAX_EXCERPT_CHARS] or "(no body)"


def _parse_retry_after(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # an HTTP date: our own backoff will do
