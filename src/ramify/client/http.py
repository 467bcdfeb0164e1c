"""One HTTP exchange with one server, and what each way to fail means for the request.

What matters about a failure is whether the server can have begun to sample. If the connection was never made (`Unsent`)
or the server refused before doing anything (`Busy`), sending the request again is free. If the connection broke later
(`Lost`), a sample may exist that nobody will see, and drawing another one silently would favour the short ones, which
are lost less often. Everything else is an answer, and has a name.
"""

import re
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from ramify.client.turnstile import Turnstile
from ramify.errors import (
    ContextOverflow,
    DeadlineExceeded,
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
    cls.name: cls for cls in (ContextOverflow, DeadlineExceeded, QueueFull, RequestInvalid, WeightsRefused)
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
    """The connections to one server, opened as they are needed inside the loop that asks."""

    def __init__(self, url: str, *, connect: float, connections: int) -> None:
        self.base_url = url
        self.headers: dict[str, str] = {}
        self._connect, self._most = connect, connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self.turnstile = Turnstile()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Reading has no limit of its own: every caller has a deadline. Addresses come from our config alone."""
        if self._closed:
            raise Unsent(f"{self.base_url}: the client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._most, keepalive_timeout=KEEPALIVE, socket_factory=_watchful_socket
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect),
            )
        return self._session

    async def aclose(self) -> None:
        """End them, for good."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


def open_client(url: str, *, connect: float, connections: int) -> Connections:
    """The connections to one server; opening one may take `connect` seconds."""
    return Connections(url, connect=connect, connections=connections)


def _watchful_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices within a minute that its host is gone; without that a read waits for its deadline."""
    family, kind, protocol, _, _ = address
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return found


async def exchange(http: Connections, method: str, path: str, body: Any = None, **params: str) -> bytes:
    """Send one request and return the body of its answer, or raise what went wrong."""
    content = None if body is None else msgspec.json.encode(body)
    headers = http.headers if body is None else {**http.headers, "Content-Type": "application/json"}
    try:
        async with http.session.request(
            method, http.base_url + path, data=content, params=params or None, headers=headers
        ) as response:
            data = await response.read()
            await http.turnstile.enter()  # what follows an answer is work: reading it, recording it, the next prompt
    except (aiohttp.ClientError, OSError) as error:
        raise failure(http, error) from error
    if response.status != 200:
        raise refusal(http, path, response.status, response.headers, data.decode("utf-8", "replace"))
    return data


def failure(http: Connections, error: Exception) -> Exception:
    """What a transport error means."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        why = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        return Unsent(f"{http.base_url} cannot be reached: {why}")
    return Lost(f"{http.base_url}: {type(error).__name__}: {error}".rstrip(": "))


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
    return Busy(error, _seconds(headers.get("Retry-After"))) if status == 503 else error


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
