"""One HTTP/1.1 connection, for requests and answers that are whole.

Every turn of every rollout is one exchange of two small bodies. A client that can do everything costs more for it than
all the rest of the turn, so this one only does that; the parser, which has to cope with whatever servers write, is not
ours.
"""

import asyncio
import select
from typing import NamedTuple

try:
    from httptools import HttpParserError, HttpResponseParser
except ImportError:  # it is compiled, and not to be had everywhere
    from ramify.client.h11_parser import HttpParserError, HttpResponseParser


class ConnectionBroken(Exception):
    """The connection ended, or what came over it was no answer."""


class HttpResponse(NamedTuple):
    """An answer. The names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpConnection(asyncio.Protocol):
    """A connection, one request at a time.

    Methods named `on_` are called by the parser. A request that is cancelled hangs up, so that the server stops working
    on it.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pending_response: asyncio.Future[HttpResponse] | None = None
        self._reset_parser()

    async def send(self, request: bytes) -> HttpResponse:
        """Send a request and wait for its answer."""
        if self._transport is None or self.is_closed:
            raise ConnectionBroken("the server has hung up")
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
        """Whether it is open and nothing has come since the last answer: that would be an end nobody has read yet."""
        if self._transport is None or self.is_closed:
            return False
        looking = select.poll()
        looking.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not looking.poll(0)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    # -- what comes over it --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"its answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        sized = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._headers_read and not sized and exc is None:
            self.on_message_complete()  # a body may end with its connection
        self._fail(f"{type(exc).__name__}: {exc}" if exc else "the server has hung up")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_read = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status, keep = self._parser.get_status_code(), self._parser.should_keep_alive()
        if status < 200:  # only a word in between; the answer follows
            self._reset_response()
            return
        if self._pending_response is not None and not self._pending_response.done():
            self._pending_response.set_result(HttpResponse(status, self._headers, b"".join(self._body)))
        if not keep:
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
