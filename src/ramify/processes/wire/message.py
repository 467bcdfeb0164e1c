"""Messages: one msgpack value and blobs that are sent without copying, and the headers before them.

    client                                      server
    Hello(version, client_id, proof, ack,
          session_id, hello_number) --------->
                                            <--- Welcome(session_id, ack, ..., hello_number)  or Rejected(failure)
    Request(n, ack, id, method, timeout) ---->
                                            <--- Part(n, ack, id) ... Reply(n, ack, id)  or Failure(n, ack, id, failure)
    Cancel(n, ack, id) ---------------------->
    Heartbeat(ack, last_sent, lag, ...) <----->

Messages with a sequence number `n` are kept until the other side acknowledges them with `ack`. A server that does not
know the sender replies `UnknownClientHeader`, and the client sends its hello again. `ResendHeader` asks for every
sequenced message after `ack`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ramify.core.errors import Failure, RequestInvalid

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_FRAMES = 1024
MAX_BODY_FRAMES = MAX_FRAMES - 2  # of a message's own; the routing id and the header come before them
MAX_TEXT_CHARS = 4096  # of each text in a failure that is truncated
encode_header = msgspec.msgpack.Encoder().encode
_encode_value = msgspec.msgpack.Encoder().encode
T = TypeVar("T")
Frame = bytes | memoryview


class MalformedMessage(Exception):
    """A received message does not follow the protocol."""


class WireHeader(msgspec.Struct, array_like=True, tag_field="kind"):
    """The base of all headers. Tags and the order of fields are the format; names are not sent."""


class HelloHeader(WireHeader, tag=0):
    """Opens a connection. `version` is the first field in every version of the protocol.

    `ack` refers to `session_id`, the last session that the client knows; the server may have closed it. A client
    repeats its hello, each with the next `hello_number`, until the last one is answered. An answer to an earlier hello
    is not enough: the server may have closed that session before it received the last hello.
    """

    version: int
    client_id: str
    proof: bytes
    ack: int
    session_id: str = ""
    hello_number: int = 0


class WelcomeHeader(WireHeader, tag=1):
    """The client's session. A new session id means that the server has lost all earlier requests."""

    session_id: str
    ack: int
    max_frame_bytes: int
    hello_number: int = 0  # of the hello that this answers


class RejectedHeader(WireHeader, tag=2):
    """The server rejects the client; `failure` says why."""

    failure: Failure


class UnknownClientHeader(WireHeader, tag=3):
    """The server has received a message over a connection without a hello."""


class HeartbeatHeader(WireHeader, tag=4):
    """A heartbeat, sent even while the sender's event loop is blocked.

    `lag` is how long that event loop has been blocked; if it is long, `task` and `stack` say by what. `last_sent` is
    the number of the last message sent, so that the receiver notices a lost one.
    """

    ack: int
    last_sent: int
    lag: float = 0.0
    task: str = ""
    stack: str = ""


class ResendHeader(WireHeader, tag=5):
    """Requests every sequenced message after `ack`."""

    ack: int


class GoodbyeHeader(WireHeader, tag=6):
    """The sender closes the connection."""


class SequencedHeader(WireHeader):
    """The base of headers with a sequence number; `SequencedStream.enqueue` sets both fields."""

    sequence_number: int
    ack: int


class RequestHeader(SequencedHeader, tag=7):
    """A request; `timeout` is in seconds."""

    request_id: int
    method: str
    timeout: float


class CancelHeader(SequencedHeader, tag=8):
    """Cancels a request."""

    request_id: int


class PartHeader(SequencedHeader, tag=9):
    """One part of a streamed reply."""

    request_id: int


class ReplyHeader(SequencedHeader, tag=10):
    """The reply to a request, which ends it."""

    request_id: int


class FailureHeader(SequencedHeader, tag=11):
    """The failure of a request, which ends it."""

    request_id: int
    failure: Failure


AnyHeader = (
    HelloHeader
    | WelcomeHeader
    | RejectedHeader
    | UnknownClientHeader
    | HeartbeatHeader
    | ResendHeader
    | GoodbyeHeader
    | RequestHeader
    | CancelHeader
    | PartHeader
    | ReplyHeader
    | FailureHeader
)

_decode = msgspec.msgpack.Decoder(AnyHeader).decode


def truncate_failure(failure: Failure) -> Failure:
    """Return the failure, shortened if its header would be too long: the peer would reject the connection."""
    return failure if len(encode_header(failure)) <= MAX_HEADER_BYTES // 2 else _truncate(failure)


def _truncate(failure: Failure) -> Failure:
    return msgspec.structs.replace(
        failure,
        name=failure.name[:MAX_TEXT_CHARS],
        message=_truncate_text(failure.message),
        traceback=None if failure.traceback is None else _truncate_text(failure.traceback),
        cause=None if failure.cause is None else _truncate(failure.cause),
    )


def _truncate_text(text: str) -> str:
    """Keep the start and the end: an error message says most at its start, a traceback at its end."""
    half = MAX_TEXT_CHARS // 2
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:half]} ... {text[-half:]}"


def decode_header(header: bytes | memoryview, num_frames: int) -> AnyHeader:
    """Decode the header of a message of `num_frames` frames. Raises MalformedMessage."""
    if len(header) > MAX_HEADER_BYTES or num_frames > MAX_FRAMES:
        raise MalformedMessage(f"a header of {len(header)} bytes or a message of {num_frames} frames is too large")
    try:
        decoded: AnyHeader = _decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the header cannot be decoded: {error}") from error
    if isinstance(decoded, SequencedHeader) and (decoded.sequence_number < 1 or decoded.ack < 0):
        raise MalformedMessage(f"sequence number {decoded.sequence_number} or ack {decoded.ack} is out of range")
    return decoded


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


@dataclass(frozen=True, slots=True)
class WireMessage:
    """The frames of one message: the first holds a msgpack value, the others are blobs."""

    frames: Sequence[Frame]

    @classmethod
    def encode(cls, value: Any = None, *blobs: Frame) -> "WireMessage":
        """Return a message of `value` and `blobs`."""
        return cls((_encode_value(value), *blobs))

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
