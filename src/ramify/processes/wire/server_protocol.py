"""The server's side of all connections, without I/O.

A client has a session, which outlives its connection: it may reconnect and continue where it was. A client that sends
malformed messages, or does not acknowledge what it receives, is rejected; other clients are not affected.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence

import zmq

from ramify.core.errors import Failure, PeerRefused, QueueFull, RamifyError
from ramify.processes.wire.address import make_proof
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import (
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
    WireMessage,
    WireSettings,
    decode_header,
    encode_header,
)
from ramify.processes.wire.socket_protocol import ProtocolEvent, SequencedStream, SocketProtocol, make_heartbeat

MAX_BANNED = 4096  # rejected connections whose messages are ignored; the oldest are forgotten first


class WireSession:
    """One client, over any number of successive connections; `routing_id` identifies the current one."""

    def __init__(self, client_id: str, routing_id: bytes, now: float) -> None:
        self.client_id, self.routing_id = client_id, routing_id
        self.session_id = secrets.token_hex(8)
        self.stream = SequencedStream()
        self.last_received_time, self.last_heartbeat_time = now, 0.0
        self.is_closed = False


class ServerProtocol(SocketProtocol):
    """The sessions of one server, by client id."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", secret: str | None, settings: WireSettings, loop_monitor: LoopMonitor
    ) -> None:
        super().__init__(socket, secret, settings, loop_monitor, silence_limit=settings.session_timeout)
        self.sessions: dict[str, WireSession] = {}
        self.num_rejected = 0
        self._sessions_by_routing_id: dict[bytes, WireSession] = {}
        self._banned: OrderedDict[bytes, None] = OrderedDict()

    # -- called by the driver ------------------------------------------------------------------------------------------

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """Handle one message of a client; a client that sends an invalid message is rejected."""
        routing_id = frames[0].bytes
        if routing_id in self._banned:
            return
        try:
            if len(frames) < 2:
                raise MalformedMessage("the message is empty")
            self._handle_header(routing_id, decode_header(frames[1].buffer, len(frames)), frames[2:], now)
        except MalformedMessage as error:
            self._reject(routing_id, PeerRefused(f"malformed message: {error}"))
        except RamifyError as error:
            self._reject(routing_id, error)

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        """Send a message of a session that is open."""
        session, header, body = command
        if not session.is_closed:
            session.stream.enqueue(header, body)
            self._flush(session)

    def tick(self, now: float) -> float:
        """Send heartbeats, close the sessions of silent clients, and return the seconds until the next call."""
        interval = self._settings.heartbeat_interval
        pause = self._measure_pause(now)
        for session in list(self.sessions.values()):
            session.last_received_time = min(now, session.last_received_time + pause)
            if now - session.last_received_time > self._settings.session_timeout:
                self._close_session(session, f"no message for {self._settings.session_timeout:g} s")
            elif session.stream.unacked_bytes > self._settings.max_unacked_bytes:
                self._reject(
                    session.routing_id, PeerRefused(f"{session.stream.num_unacked} messages were not acknowledged")
                )
            elif now - session.last_heartbeat_time >= interval:
                session.last_heartbeat_time = now
                self._flush(session)
                self._send_header(session.routing_id, make_heartbeat(session.stream, self._loop_monitor))
        return min(interval / 4, 0.25)

    def send_goodbye(self) -> None:
        """Send what is pending, then tell all clients that the server leaves."""
        self._closing = True
        for session in self.sessions.values():
            self._flush(session)
            self._send_header(session.routing_id, GoodbyeHeader())
        self.goodbye_done = not self.sessions

    # -- received headers ----------------------------------------------------------------------------------------------

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
                self._close_session(session, "it closed the connection")
            case _:
                raise MalformedMessage(f"a client does not send {type(header).__name__}")

    def _handle_hello(self, routing_id: bytes, hello: HelloHeader, now: float) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise PeerRefused(f"the client has wire protocol {hello.version}, this server {PROTOCOL_VERSION}")
        if not hmac.compare_digest(hello.proof, make_proof(self._secret, hello.client_id)):
            raise PeerRefused("the client does not know the secret of this server")
        session = self.sessions.get(hello.client_id)
        if session is None:
            if len(self.sessions) >= self._settings.max_clients:
                raise QueueFull(f"{len(self.sessions)} clients are already connected")
            session = self.sessions[hello.client_id] = WireSession(hello.client_id, routing_id, now)
        self._sessions_by_routing_id.pop(session.routing_id, None)
        self._sessions_by_routing_id[routing_id] = session
        session.routing_id, session.last_received_time = routing_id, now
        session.stream.resend_after(hello.ack if hello.session_id == session.session_id else 0)
        limit = self._settings.max_frame_bytes
        welcome = WelcomeHeader(session.session_id, session.stream.received, limit, hello.hello_number)
        self._send_header(routing_id, welcome)
        self._flush(session)

    def _handle_sequenced(
        self, session: WireSession, header: RequestHeader | CancelHeader, body: Sequence[zmq.Frame]
    ) -> None:
        if not self._accept(session.stream, header, lambda answer: self._send_header(session.routing_id, answer)):
            return
        if isinstance(header, RequestHeader):
            self.events.append(("request", session, header, WireMessage([frame.buffer for frame in body])))
        else:
            self.events.append(("cancel", session, header.request_id))

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
        self.goodbye_done = not self.sessions
        self.events.append(("client_gone", session, reason))
