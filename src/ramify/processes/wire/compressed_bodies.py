"""Requests with compressed bodies: some clients send `Content-Encoding: gzip`.

The body is decompressed piece by piece while the application reads it, so that a small body that becomes a huge one is
refused before it is in memory.
"""

import zlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.core.errors import RequestInvalid

MAX_BODY_BYTES = 128 * 2**20  # of a decompressed body: images in base64, and the history
PIECE_BYTES = 2**18
GZIP_WINDOW = 16 + zlib.MAX_WBITS  # with the header of gzip


class CompressedBodies:
    """ASGI middleware that decompresses the bodies of requests. The application gets RequestInvalid as it reads one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a body that is not compressed."""
        headers: dict[bytes, bytes] = dict(scope["headers"]) if scope["type"] == "http" else {}
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            receive = _GzipReader(receive, encoding.decode("latin-1"))
        await self._app(scope, receive, send)


class _GzipReader:
    """Receives the messages of a request with their bodies decompressed; a call returns at most PIECE_BYTES."""

    def __init__(self, receive: Receive, encoding: str) -> None:
        self._receive, self._encoding = receive, encoding
        self._decompressor = zlib.decompressobj(GZIP_WINDOW)
        self._has_more_output, self._has_more_input = False, True
        self._num_bytes = 0

    async def __call__(self) -> Message:
        if self._encoding not in ("gzip", "x-gzip"):
            raise RequestInvalid(f"content-encoding: expected gzip or none, found {self._encoding!r:.80}")
        data = self._decompressor.unconsumed_tail
        if not self._has_more_output:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data, self._has_more_input = message.get("body", b""), bool(message.get("more_body"))
        piece = self._decompress(data)
        return {
            "type": "http.request",
            "body": piece,
            "more_body": self._has_more_input or self._has_more_output,
        }

    def _decompress(self, data: bytes) -> bytes:
        try:
            piece = self._decompressor.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise RequestInvalid(f"the body is not valid gzip: {error}") from error
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_BODY_BYTES:
            raise RequestInvalid(f"the decompressed body is larger than {MAX_BODY_BYTES} bytes; send a smaller one")
        self._has_more_output = len(piece) == PIECE_BYTES
        return piece
