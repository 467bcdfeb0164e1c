"""One HTTP exchange with one server, and what each way to fail means for the request.

What matters about a failure is whether the server can have begun to sample. If the connection was never made (`Unsent`)
or the server refused before doing anything (`Busy`), sending the request again is free. If the connection broke later
(`Lost`), a sample may exist that nobody will see, and drawing another one silently would favour the short ones, which
are lost less often. Everything else is an answer, and has a name.
"""

import re
import socket
from typing import Any

import httpx
import msgspec

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


def open_client(url: str, *, connect: float, connections: int) -> httpx.AsyncClient:
    """The connections to one server. Reading has no limit of its own: every caller has a deadline."""
    limits = httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE
    )
    transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=_watchful())
    timeout = httpx.Timeout(None, connect=connect)
    return httpx.AsyncClient(base_url=url, timeout=timeout, transport=transport, trust_env=False)


def _watchful() -> list[tuple[int, int, int]]:
    """Socket options that notice within a minute that a host is gone; without them a read waits for its deadline."""
    seconds = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    known = [(socket.IPPROTO_TCP, getattr(socket, name), n) for name, n in seconds.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *known]


async def exchange(http: httpx.AsyncClient, method: str, path: str, body: Any = None, **params: str) -> bytes:
    """Send one request and return the body of its answer, or raise what went wrong."""
    content = None if body is None else msgspec.json.encode(body)
    headers = None if body is None else {"Content-Type": "application/json"}
    try:
        response = await http.request(method, path, content=content, params=params or None, headers=headers)
    except httpx.HTTPError as error:
        raise failure(http, error) from error
    if response.status_code != 200:
        raise refusal(http, path, response.status_code, response.headers, response.text)
    return response.content


def failure(http: httpx.AsyncClient, error: httpx.HTTPError) -> Exception:
    """What a transport error means."""
    said = f"{http.base_url}: {type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unsent(said)
    return Lost(said)


def refusal(http: httpx.AsyncClient, path: str, status: int, headers: httpx.Headers, text: str) -> Exception:
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
