"""One HTTP/1.1 connection for complete requests and responses.

Every turn of every rollout is one request and one response with small bodies. A general HTTP client costs more CPU than
the rest of the turn, so this one supports only complete bodies. Parsing is left to httptools.
"""

import asyncio
import select
from typing import NamedTuple

try:
    from httptools import HttpParserError, HttpResponseParser
except ImportError:  # there is no wheel for some platforms
    from ramify.client.h11_parser import HttpParserError, HttpResponseParser


class ConnectionBroken(Exception):
    """The connection ended before the response, or the response is not HTTP."""


class HttpResponse(NamedTuple):
    """A response. The names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpConnection(asyncio.Protocol):
    """A connection for one request at a time.

    Methods named `on_*` are called by the parser. Cancelling a request closes the connection, so that the server stops
    working on it.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pending_response: asyncio.Future[HttpResponse] | None = None
        self._reset_parser()

    async def send(self, request: bytes) -> HttpResponse:
        """Send an encoded request and wait for its response. Raises ConnectionBroken."""
        if self._transport is None or self.is_closed:
            raise ConnectionBroken("the server closed the connection")
        self._pending_response = asyncio.get_running_loop().create_future()
        self._reset_parser()
        self._transport.write(request)
        try:
            return await self._pending_response
        except BaseException:
            self.close()
            raise
        finally:
            self._pending_response = None

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def is_usable(self) -> bool:
        """Return whether the connection is open and has no unread data, which would be the server's close."""
        if self._transport is None or self.is_closed:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of asyncio and of the parser ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the response is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._headers_read and not has_length and exc is None:
            self.on_message_complete()  # a body without a length ends with its connection
        self._fail(f"{type(exc).__name__}: {exc}" if exc else "the server closed the connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_read = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status, keep_alive = self._parser.get_status_code(), self._parser.should_keep_alive()
        if status < 200:  # informational; the response follows
            self._reset_response()
            return
        if self._pending_response is not None and not self._pending_response.done():
            self._pending_response.set_result(HttpResponse(status, self._headers, b"".join(self._body)))
        if not keep_alive:
            self.close()

    def _reset_parser(self) -> None:
        self._parser = HttpResponseParser(self)
        self._reset_response()

    def _reset_response(self) -> None:
        self._headers: dict[str, str] = {}
        self._headers_read = False
        self._body: list[bytes] = []

    def _fail(self, reason: str) -> None:
        if self._pending_response is not None and not self._pending_response.done():
            self._pending_response.set_exception(ConnectionBroken(reason))
        self.close()
