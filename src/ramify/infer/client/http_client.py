"""HTTP requests to one server, and the errors that a request can end with.

What matters about a failure is whether the server may have started to sample. If the connection was never made
(`ConnectFailed`) or the server refused the request (`ServerBusy`), it can be sent again. If the connection broke later
(`ResponseLost`), a sample may exist that is lost, and drawing another one silently would favour short samples, which
are lost less often. Every other failure is a RamifyError.

Importing aiohttp takes a third of a second, so only a process that opens a client does it.
"""

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlencode

import msgspec

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import (
    ContextOverflow,
    DeadlineExceeded,
    ImageMissing,
    PeerRefused,
    ProcessReplaced,
    ProviderError,
    QueueFull,
    RamifyError,
    RequestInvalid,
    WeightsMissing,
    WeightsRefused,
    WeightsReplaced,
)

if TYPE_CHECKING:
    import aiohttp


class LoopPacer:
    """Lets one task continue in each iteration of the event loop, in order.

    When hundreds of responses arrive together, all tasks that wait for them would continue in the same iteration. Until
    it ends, no timer fires and no heartbeat is sent.
    """

    __slots__ = ("_active_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._active_loop: asyncio.AbstractEventLoop | None = None  # the loop in which `_release_next` is scheduled

    async def wait_turn(self) -> None:
        """Wait for this task's turn; return at once if no other task had one in this iteration."""
        loop = asyncio.get_running_loop()
        if self._active_loop is not loop:  # idle, or left over from a loop that has ended
            self._active_loop = loop
            self._waiting.clear()
            loop.call_soon(self._release_next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # done if its task was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._release_next)
                return
        self._active_loop = None


MAX_EXCERPT_CHARS = 300  # of a body in an error message
KEEPALIVE_EXPIRY = 2.0  # below uvicorn's 5 s: a connection must not be used while the server closes it for being idle
FAILURES_BY_NAME: dict[str, type[RamifyError]] = {
    cls.name: cls
    for cls in (
        ContextOverflow,
        DeadlineExceeded,
        ImageMissing,
        PeerRefused,
        ProcessReplaced,
        QueueFull,
        RequestInvalid,
        WeightsMissing,
        WeightsRefused,
        WeightsReplaced,
    )
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


class HttpResponse(NamedTuple):
    """A complete response. Header names are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """The connections to one server, opened on demand in the running event loop.

    Connecting to the server's address may take `connect_timeout` seconds. Resolving its host name, waiting for a free
    connection and waiting for a response are not limited here: every caller has a timeout. A request that is cancelled
    closes its connection, so that the server stops working on it. `headers` are sent with every request; `pacer` limits
    how many responses are handled per loop iteration.
    """

    def __init__(self, url: str, *, connect_timeout: float, max_connections: int) -> None:
        import aiohttp  # here and not in the first request, which would stop the event loop

        self.base_url = url
        self.headers: dict[str, str] = {}
        self.pacer = LoopPacer()
        self._connect_timeout, self._max_connections = connect_timeout, max_connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; later requests raise ConnectFailed."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, content_type: str = "application/json"
    ) -> HttpResponse:
        """Send one request and wait for its response.

        Raises ConnectFailed, ResponseLost, or RequestInvalid if a header holds a line break.
        """
        import aiohttp

        session = self._open_session()
        data = None if body is None else get_body_class()(body, content_type=content_type)
        try:
            response = await session.request(method, self.base_url + path, data=data, headers=self.headers)
            return HttpResponse(response.status, response.headers, await response.read())
        except aiohttp.ConnectionTimeoutError as error:
            message = f"{self.base_url} cannot be reached: no connection within {self._connect_timeout:g} s"
            raise ConnectFailed(message) from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ConnectFailed(f"{self.base_url!r} is not an address; expected http://host:port") from error
        except aiohttp.ClientConnectorError as error:  # also a certificate that is not trusted
            raise ConnectFailed(f"{self.base_url} cannot be reached: {error}") from error
        except aiohttp.ClientError as error:
            if data is not None and data.was_refused:
                raise ConnectFailed(f"{self.base_url} closed the connection before the request was sent") from error
            raise ResponseLost(f"{self.base_url}: {error or type(error).__name__}") from error
        except ValueError as error:
            message = f"{self.base_url}: a header (perhaps the API key) holds a line break: {error}"
            raise RequestInvalid(message) from error

    def _open_session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._closed:
            raise ConnectFailed(f"{self.base_url}: the client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._max_connections,
                keepalive_timeout=KEEPALIVE_EXPIRY,
                ssl=default_ssl_context() if self.base_url.startswith("https:") else True,
                socket_factory=_create_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},  # responses are small, and often on the same machine
            )
        return self._session


@lru_cache(maxsize=1)
def get_body_class() -> type[Any]:
    """Return a class of request bodies that record whether a connection took them."""
    import aiohttp

    class RequestBody(aiohttp.BytesPayload):
        was_refused: bool | None = None  # true if each connection was closed when the body was written to it

        async def write_with_length(self, writer: Any, content_length: int | None) -> None:
            is_closed = writer.transport is None or writer.transport.is_closing()
            self.was_refused = is_closed and self.was_refused is not False
            await super().write_with_length(writer, content_length)  # which also sends the headers

    return RequestBody


@lru_cache(maxsize=1)
def default_ssl_context() -> ssl.SSLContext:
    """Return the system's default context, cached because loading its certificates is slow."""
    return ssl.create_default_context()


def _create_socket(address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """Create a socket that detects within a minute that the other host is gone, not when the caller's timeout ends."""
    family, kind, protocol, _, _ = address
    created = socket.socket(family, kind, protocol)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):
            created.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return created


async def send_request(http: HttpClient, method: str, path: str, body: Any = None, **query: str) -> bytes:
    """Send one request with a JSON body and return the body of its response.

    Raises RequestFailed, RequestInvalid if a header holds a line break, or the RamifyError that a status other than 200
    means.
    """
    content = None if body is None else msgspec.json.encode(body)
    response = await http.request(method, f"{path}?{urlencode(query)}" if query else path, content)
    await http.pacer.wait_turn()  # handling a response takes CPU: decoding, recording, rendering the next prompt
    return read_body(http, path, response)


def read_body(http: HttpClient, path: str, response: HttpResponse) -> bytes:
    """Return the body of a response with status 200; raise the failure that any other status means."""
    if response.status != 200:
        raise error_from_response(http, path, response)
    return response.body


def error_from_response(http: HttpClient, path: str, response: HttpResponse) -> Exception:
    """Return the failure that a response with a status other than 200 means."""
    fields = _parse_error_body(response.body.decode("utf-8", "replace"))
    name, message = str(fields.get("type")), str(fields["message"])
    status = response.status
    error: RamifyError
    if name in FAILURES_BY_NAME:
        hashes = fields.get("hashes")
        error = ImageMissing(message, list(map(str, hashes))) if is_list(hashes) else FAILURES_BY_NAME[name](message)
    elif status == 400 and CONTEXT_OVERFLOW_RE.search(message):
        error = ContextOverflow(message)
    elif status in (400, 422):
        error = RequestInvalid(f"{http.base_url}{path} returned status {status}: {message}")
    else:
        error = ProviderError(f"{http.base_url}{path} returned status {status}: {message}")
    return ServerBusy(error, _parse_retry_after(response.headers.get("retry-after"))) if status == 503 else error


def _parse_error_body(text: str) -> dict[str, Any]:
    """Return the fields of an error in OpenAI's format; if the body has another one, its text is the `message`."""
    try:
        fields = msgspec.json.decode(text)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        fields = None
    return fields if is_dict(fields) and "message" in fields else {"message": text[:MAX_EXCERPT_CHARS] or "(no body)"}


def _parse_retry_after(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # an HTTP date is ignored
