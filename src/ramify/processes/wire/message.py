"""The content of a request or reply: one msgpack value, and blobs that are sent without copying."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ramify.core.errors import RequestInvalid

# Timeouts and limits of a connection.


@dataclass(frozen=True, slots=True)
class WireSettings:
    """Timeouts and limits of a connection. Each side uses its own; they are not negotiated."""

    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats."""
    server_timeout: float = 10.0
    """Seconds of silence after which a client fails its pending calls with PeerLost."""
    session_timeout: float = 30.0
    """Seconds of silence after which a server closes a client's session and cancels its requests."""
    max_open_requests: int = 8192
    """The maximum number of open requests per client and per server; further ones fail with QueueFull."""
    max_frame_bytes: int = 1 << 30
    """The maximum size of a frame; a client that sends a larger one is disconnected."""
    max_unacked_bytes: int = 1 << 30
    """The maximum of bytes that a client has not acknowledged; above a quarter of it, streamed parts are skipped."""
    max_clients: int = 1024
    """The maximum number of sessions of a server."""


T = TypeVar("T")
Frame = bytes | memoryview

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class WireMessage:
    """The frames of one message: the first holds a msgpack value, the others are blobs."""

    frames: Sequence[Frame]

    @classmethod
    def encode(cls, value: Any = None, *blobs: Frame) -> "WireMessage":
        """Return a message of `value` and `blobs`."""
        return cls((_encode(value), *blobs))

    def decode(self, expected_type: type[T]) -> T:
        """Return the value. Raises RequestInvalid if it is no `expected_type`."""
        try:
            return msgspec.msgpack.decode(self.frames[0] if self.frames else b"", type=expected_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestInvalid(f"expected a {getattr(expected_type, '__name__', expected_type)}: {error}") from error

    @property
    def blobs(self) -> Sequence[Frame]:
        """The frames after the value."""
        return self.frames[1:]
