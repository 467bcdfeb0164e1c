"""The server's end: who is connected, what they have not acknowledged, and who is cut off.

A client is a session, not a socket: it may come back over another connection and goes on where it was. One that sends
what is no frame, or takes nothing it is sent, is refused; the others never notice.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence

import zmq

from ramify.errors import Failure, PeerRefused, QueueFull, RamifyError
from ramify.wire.address import make_proof
from ramify.wire.headers import (
    PROTOCOL_VERSION,
    AnyHeader,
    CancelHeader,
    GoodbyeHeader,
    HeartbeatHeader,
    HelloHeader,
    MalformedMessage,
    RejectedHeader,
    RequestHeader,
    ResendHeader,
    UnknownClientHeader,
    WelcomeHeader,
    WireHeader,
    decode_header,
    encode_header,
)
from ramify.wire.loop_monitor import LAG_REPORT_THRESHOLD, LoopMonitor
from ramify.wire.message import WireMessage
from ramify.wire.pause_detector import PauseDetector
from ramify.wire.sequenced_stream import SequencedStream
from ramify.wire.settings import WireSettings
from ramify.wire.socket_driver import ProtocolEvent, make_sender

MAX_BANNED = 4096  # connections that are remembered as cut off
ACK_EVERY = 16  # frames after which a client is told that they came


class WireSession:
    """One client, over however many connections."""

    def __init__(self, client_id: str, routing_id: bytes, now: float) -> None:
        self.client_id, self.routing_id = client_id, routing_id
        self.session_id = secrets.token_hex(8)
        self.stream = SequencedStream()
        self.last_received_time, self.last_heartbeat_time = now, 0.0
        self.is_closed = False


class ServerProtocol:
    """All clients of one server."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", secret: str | None, settings: WireSettings, loop_monitor: LoopMonitor
    ) -> None:
        self.events: list[ProtocolEvent] = []
        self.sessions: dict[str, WireSession] = {}
        self.num_rejected = 0
        self._send = make_sender(socket)
        self._secret, self._settings, self._loop_monitor = secret, settings, loop_monitor
        self._sessions_by_routing_id: dict[bytes, WireSession] = {}
        self._banned: OrderedDict[bytes, None] = OrderedDict()
        self._closing = False
        self._pause_detector = PauseDetector(settings.session_timeout)

    # -- turned by the pump --------------------------------------------------------------------------------------------

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        route = frames[0].bytes
        if route in self._banned:
            return
        try:
            if len(frames) < 2:
                raise MalformedMessage("an empty message")
            said = decode_header(frames[1].buffer, len(frames))
            self._handle_header(route, said, frames[2:], now)
        except MalformedMessage as error:
            self._reject(route, PeerRefused(f"malformed: {error}"))
        except RamifyError as error:
            self._reject(route, error)

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        session, header, body = command
        if not session.is_closed:
            session.stream.enqueue(header, body)
            self._flush(session)

    def tick(self, now: float) -> float:
        interval = self._settings.heartbeat_interval
        paused = self._pause_detector.measure_pause(now)
        for session in list(self.sessions.values()):
            session.last_received_time = min(now, session.last_received_time + paused)
            if now - session.last_received_time > self._settings.session_timeout:
                self._close_session(session, f"not heard for {self._settings.session_timeout:g} s")
            elif session.stream.unacked_bytes > self._settings.max_unacked_bytes:
                self._reject(
                    session.routing_id, PeerRefused(f"{session.stream.num_unacked} frames were never acknowledged")
                )
            elif now - session.last_heartbeat_time >= interval:
                session.last_heartbeat_time = now
                self._flush(session)
                self._send_header(session.routing_id, make_heartbeat(session.stream, self._loop_monitor))
        return min(interval / 4, 0.25)

    def send_goodbye(self) -> None:
        self._closing = True
        for session in self.sessions.values():
            self._flush(session)
            self._send_header(session.routing_id, GoodbyeHeader())

    @property
    def goodbye_done(self) -> bool:
        return not self.sessions

    # -- what is said --------------------------------------------------------------------------------------------------

    def _handle_header(self, routing_id: bytes, header: AnyHeader, body: Sequence[zmq.Frame], now: float) -> None:
        if isinstance(header, HelloHeader):
            self._handle_hello(routing_id, header, now)
            return
        session = self._sessions_by_routing_id.get(routing_id)
        if session is None:
            self._send_header(routing_id, UnknownClientHeader())
            return
        session.last_received_time = now
        match header:
            case RequestHeader() | CancelHeader():
                self._handle_sequenced(session, header, body)
            case HeartbeatHeader():
                session.stream.handle_ack(header.ack)
                if header.last_sent > session.stream.received:
                    self._send_header(routing_id, ResendHeader(session.stream.received))
            case ResendHeader():
                session.stream.resend_after(header.ack)
                self._flush(session)
            case GoodbyeHeader():
                if not self._closing:
                    self._send_header(routing_id, GoodbyeHeader())
                self._close_session(session, "said goodbye")
            case _:
                raise MalformedMessage(f"a client does not say {type(header).__name__}")

    def _handle_hello(self, routing_id: bytes, hello: HelloHeader, now: float) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise PeerRefused(f"the client speaks version {hello.version} of the wire, this server {PROTOCOL_VERSION}")
        if not hmac.compare_digest(hello.proof, make_proof(self._secret, hello.client_id)):
            raise PeerRefused("the client does not know the secret of this server")
        session = self.sessions.get(hello.client_id)
        if session is None:
            if len(self.sessions) >= self._settings.max_clients:
                raise QueueFull(f"{len(self.sessions)} clients are connected already")
            session = self.sessions[hello.client_id] = WireSession(hello.client_id, routing_id, now)
        self._sessions_by_routing_id.pop(session.routing_id, None)
        self._sessions_by_routing_id[routing_id] = session
        session.routing_id, session.last_received_time = routing_id, now
        session.stream.resend_after(hello.ack if hello.session_id == session.session_id else 0)
        self._send_header(
            routing_id,
            WelcomeHeader(
                session.session_id, session.stream.received, self._settings.max_frame_bytes, hello.hello_number
            ),
        )
        self._flush(session)

    def _handle_sequenced(
        self, session: WireSession, header: RequestHeader | CancelHeader, body: Sequence[zmq.Frame]
    ) -> None:
        link = session.stream
        if not link.accept(header):
            if link.needs_resend(header.sequence_number - 1):
                self._send_header(session.routing_id, ResendHeader(link.received))
            return
        if isinstance(header, RequestHeader):
            self.events.append(("request", session, header, WireMessage([frame.buffer for frame in body])))
        else:
            self.events.append(("cancel", session, header.request_id))
        if link.received - link.acked >= ACK_EVERY:
            self._send_header(session.routing_id, make_heartbeat(link, self._loop_monitor))

    def _flush(self, session: WireSession) -> None:
        session.stream.flush(lambda frames: self._send([session.routing_id, *frames]))

    def _send_header(self, routing_id: bytes, header: WireHeader) -> None:
        self._send([routing_id, encode_header(header)])

    def _reject(self, routing_id: bytes, error: RamifyError) -> None:
        self.num_rejected += 1
        self._send_header(routing_id, RejectedHeader(Failure(error.name, error.message, error.blame, error.retryable)))
        self._banned[routing_id] = None
        while len(self._banned) > MAX_BANNED:
            self._banned.popitem(last=False)
        if (session := self._sessions_by_routing_id.get(routing_id)) is not None:
            self._close_session(session, error.message)

    def _close_session(self, session: WireSession, reason: str) -> None:
        session.is_closed = True
        self.sessions.pop(session.client_id, None)
        self._sessions_by_routing_id.pop(session.routing_id, None)
        self.events.append(("gone", session, reason))


def make_heartbeat(stream: SequencedStream, loop_monitor: LoopMonitor) -> HeartbeatHeader:
    """A sign of life that says what came, and how the loop beside it does."""
    lag = loop_monitor.lag
    task, stack = loop_monitor.inspect_running_task() if lag > LAG_REPORT_THRESHOLD else ("", "")
    stream.acked = stream.received
    return HeartbeatHeader(stream.received, stream.flushed, lag, task, stack)
