"""The headers that travel before a message's own frames.

    client                                 server
    Hello(version, client, proof,
          got, session, knock) -------->
                                       <--- Welcome(session, got, knock)  or Refused(failure)
    Request(n, id, method, left) ------>
                                       <--- Part(n, id) ... Reply(n, id)  or Fail(n, id, failure)
    Cancel(n, id) --------------------->
    Beat(got, sent, lag) <------------->

Frames with a number `n` are kept until the other side says that it `got` them. A server that does not know who speaks
says `Who`, and the client introduces itself again; `Again` asks for all numbered frames after the last one that came.
"""

import msgspec

from ramify.errors import Failure

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_FRAMES = 1024
MAX_BODY_FRAMES = MAX_FRAMES - 2  # frames of a message's own: the header comes before them, and a route may
MAX_TEXT_CHARS = 4096  # characters of each text of a failure that is too long for a header


class MalformedMessage(Exception):
    """Bytes that are no frame of this protocol."""


class WireHeader(msgspec.Struct, array_like=True, tag_field="kind"):
    """Anything that can be said."""


class HelloHeader(WireHeader, tag=0):
    """A client introduces itself; the version stands first in every version.

    `got` counts the frames of `session`, the last session that the client knows; the server may have forgotten it. A
    client repeats its hello, each with the next number `knock`, until the last one is answered. An answer to an earlier
    hello is not enough: the server may have forgotten its session before it received the last hello.
    """

    version: int
    client_id: str
    proof: bytes
    ack: int
    session_id: str = ""
    hello_number: int = 0


class WelcomeHeader(WireHeader, tag=1):
    """The session a client has. One it does not know means that everything it asked before is forgotten."""

    session_id: str
    ack: int
    max_frame_bytes: int
    hello_number: int = 0  # the hello that this answers


class RejectedHeader(WireHeader, tag=2):
    """The end of a client: what it did, or what it is."""

    failure: Failure


class UnknownClientHeader(WireHeader, tag=3):
    """Frames came from somebody who has not said hello."""


class HeartbeatHeader(WireHeader, tag=4):
    """A sign of life that waits for no event loop, and how long the one beside it has not turned."""

    ack: int
    last_sent: int
    lag: float = 0.0
    task: str = ""
    stack: str = ""


class ResendHeader(WireHeader, tag=5):
    """Numbered frames are missing after this one."""

    ack: int


class GoodbyeHeader(WireHeader, tag=6):
    """The end, on purpose."""


class SequencedHeader(WireHeader):
    """A frame of a stream."""

    sequence_number: int
    ack: int


class RequestHeader(SequencedHeader, tag=7):
    """A call; `left` are the seconds it has."""

    request_id: int
    method: str
    timeout: float


class CancelHeader(SequencedHeader, tag=8):
    """Nobody wants the answer to a request any more."""

    request_id: int


class PartHeader(SequencedHeader, tag=9):
    """A piece of a streamed answer."""

    request_id: int


class ReplyHeader(SequencedHeader, tag=10):
    """The end of an answer."""

    request_id: int


class FailureHeader(SequencedHeader, tag=11):
    """The end of an answer that went wrong."""

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

encode_header = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyHeader).decode


def truncate_failure(failure: Failure) -> Failure:
    """The failure, short enough for a header: one that is not would stop all that comes after it."""
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
    """Beginning and end: an error tells most where it starts, a traceback where it ends."""
    half = MAX_TEXT_CHARS // 2
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:half]} ... {text[-half:]}"


def decode_header(header: bytes | memoryview, num_frames: int) -> AnyHeader:
    """The header of a message of `count` frames; Malformed if it is none."""
    if len(header) > MAX_HEADER_BYTES or num_frames > MAX_FRAMES:
        raise MalformedMessage(f"a header of {len(header)} bytes before {num_frames} frames")
    try:
        said: AnyHeader = _decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"no header: {error}") from error
    if isinstance(said, SequencedHeader) and (said.sequence_number < 1 or said.ack < 0):
        raise MalformedMessage(f"a frame with number {said.sequence_number}")
    return said
