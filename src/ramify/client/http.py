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

from ramify.client.connection import Broken, Connection, Response
from ramify.client.turnstile import Turnstile
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

EXCERPT = 300  # characters of a body that are shown
# Below uvicorn's 5 s: a connection must not be used at the moment the server closes it for being idle.
KEEPALIVE = 2.0
NAMED: dict[str, type[RamifyError]] = {
    cls.name: cls
    for cls in (ContextOverflow, DeadlineExceeded, OriginRefused, QueueFull, RequestInvalid, WeightsRefused)
}
OVERLONG = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)


class Unsent(Exception):
    """The request never reached the server."""


class Busy(Exception):
    """The server refused with 503 before doing anything. `wait` is its Retry-After, `error` what to give up with."""

    def __init__(self, error: RamifyError, wait: float | None) -> None:
        super().__init__(error.message)
        self.error, self.wait = error, wait


class Lost(Exception):
    """The connection broke after the request was sent; it may have been sampled."""


class Connections:
    """The connections to one server, opened as they are needed inside the loop that asks.

    Waiting for an answer has no limit of its own: every caller has a deadline.
    """

    def __init__(self, url: str, *, connect: float, connections: int) -> None:
        self.base_url = url
        self.headers: dict[str, str] = {}
        self.turnstile = Turnstile()
        self._parts = urlsplit(url)
        self._connect, self._free = connect, asyncio.Semaphore(connections)
        self._open: set[Connection] = set()
        self._idle: deque[tuple[float, Connection]] = deque()  # since when, the longest first
        self._closed = False

    async def aclose(self) -> None:
        """End them, for good."""
        self._closed = True
        for connection in self._open:
            connection.close()
        await asyncio.sleep(0)  # so that those who wait hear of it

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send one request and wait for its answer; Unsent and Lost say what went wrong on the way."""
        request = self._request(method, path, body)
        async with self._free:
            connection = self._take() or await self._dial()
            try:
                answer = await connection.ask(request)
            except Broken as error:
                raise Lost(f"{self.base_url}: {error}") from error
            finally:
                self._put_back(connection)
        return answer

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Host": self._parts.netloc.rpartition("@")[2], **self.headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if method != "GET":
            headers["Content-Length"] = str(len(body or b""))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers):
            raise RequestInvalid(f"{self.base_url}: a header (an API key, perhaps) holds a line break")
        return f"{method} {self._parts.path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")

    def _take(self) -> Connection | None:
        """A connection that is open already: the one used last, so that those too many get old."""
        if self._closed:
            raise Unsent(f"{self.base_url}: the client is closed")
        oldest = time.monotonic() - KEEPALIVE
        while self._idle and (self._idle[0][0] < oldest or self._idle[0][1].closed):
            _, connection = self._idle.popleft()
            connection.close()
            self._open.discard(connection)
        while self._idle:
            _, connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    def _put_back(self, connection: Connection) -> None:
        if connection.closed:
            self._open.discard(connection)
        else:
            self._idle.append((time.monotonic(), connection))

    async def _dial(self) -> Connection:
        host, secure = self._parts.hostname, self._parts.scheme == "https"
        if host is None or self._parts.scheme not in ("http", "https"):
            raise Unsent(f"{self.base_url!r} is no address; expected http://host:port")
        try:
            async with asyncio.timeout(self._connect):
                transport, connection = await asyncio.get_running_loop().create_connection(
                    Connection, host, self._parts.port or (443 if secure else 80), ssl=trusted() if secure else None
                )
        except TimeoutError as error:
            raise Unsent(f"{self.base_url} cannot be reached: no connection within {self._connect:g} s") from error
        except OSError as error:
            raise Unsent(f"{self.base_url} cannot be reached: {error}") from error
        _watch(transport.get_extra_info("socket"))
        self._open.add(connection)
        return connection


def open_client(url: str, *, connect: float, connections: int) -> Connections:
    """The connections to one server; opening one may take `connect` seconds."""
    return Connections(url, connect=connect, connections=connections)


@lru_cache(maxsize=1)
def trusted() -> ssl.SSLContext:
    """What an https server must show: read once, it takes a while."""
    return ssl.create_default_context()


def _watch(connected: socket.socket) -> None:
    """Notice within a minute that the other host is gone; without that a read waits for its deadline."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


async def exchange(http: Connections, method: str, path: str, body: Any = None, **params: str) -> bytes:
    """Send one request and return the body of its answer, or raise what went wrong."""
    content = None if body is None else msgspec.json.encode(body)
    answer = await http.ask(method, f"{path}?{urlencode(params)}" if params else path, content)
    await http.turnstile.enter()  # what follows an answer is work: reading it, recording it, the next prompt
    return read_body(http, path, answer)


def read_body(http: Connections, path: str, answer: Response) -> bytes:
    """Return the body of an answer with status 200; raise what any other status means."""
    if answer.status != 200:
        raise refusal(http, path, answer.status, answer.headers, answer.body.decode("utf-8", "replace"))
    return answer.body


def refusal(http: Connections, path: str, status: int, headers: Mapping[str, str], text: str) -> Exception:
    """What a status other than 200 means."""
    name, message = _error(text)
    error: RamifyError
    if name in NAMED:
        error = NAMED[name](message)
    elif status == 400 and OVERLONG.search(message):
        error = ContextOverflow(message)
    elif status in (400, 422):
        error = RequestInvalid(f"{http.base_url}{path} answered {status}: {message}")
    else:
        error = ProviderError(f"{http.base_url}{path} answered {status}: {message}")
    return Busy(error, _seconds(headers.get("retry-after"))) if status == 503 else error


def _error(text: str) -> tuple[str | None, str]:
    """The name and the message in the body of a refusal, as OpenAI-shaped servers write them."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error.get("type")), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None, text[:EXCERPT] or "(no body)"


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # an HTTP date: our own backoff will do
