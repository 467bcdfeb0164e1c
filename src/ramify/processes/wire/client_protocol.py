"""The client's side of a connection, without I/O: it reconnects whenever the connection breaks.

    CONNECTING --welcome to the last hello--> CONNECTED --silence, or unknown client--> CONNECTING
        |
        +--rejected--> REJECTED

A restarted server assigns a new session. Requests of the old session are lost, and their callers get PeerLost.
"""

import uuid
from collections.abc import Sequence
from enum import Enum

import zmq

from ramify.processes.wire.address import make_proof
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import (
    PROTOCOL_VERSION,
    AnyHeader,
    FailureHeader,
    GoodbyeHeader,
    HeartbeatHeader,
    HelloHeader,
    MalformedMessage,
    PartHeader,
    RejectedHeader,
    ReplyHeader,
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

HELLO_INTERVAL = 0.05  # seconds between the first two hellos; doubles up to the heartbeat interval
EVENT_NAMES = {PartHeader: "part", ReplyHeader: "reply", FailureHeader: "failure"}


class ConnectionState(Enum):
    """The state of a client's connection; the transitions are in the module docstring."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    REJECTED = "rejected"


class ClientProtocol(SocketProtocol):
    """The state of one client's connection.

    `session_number` counts the sessions that the server has lost; commands of an earlier session are dropped.
    `last_heartbeat` and `max_frame_bytes` are the server's.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", secret: str | None, settings: WireSettings, loop_monitor: LoopMonitor
    ) -> None:
        super().__init__(socket, secret, settings, loop_monitor, silence_limit=settings.server_timeout)
        self.client_id = uuid.uuid4().hex
        self.state = ConnectionState.CONNECTING
        self.stream = SequencedStream()
        self.session_number = 0
        self.last_received_time = 0.0
        self.last_heartbeat = HeartbeatHeader(0, 0)
        self.max_frame_bytes = settings.max_frame_bytes
        self._session_id = ""
        self._loss_reported = False
        self._last_sent_time = 0.0  # of a hello or heartbeat
        self._hello_attempts = 0  # since the last connection
        self._num_hellos = 0  # since the start

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """Handle one message of the server; malformed messages are ignored."""
        try:
            self._handle_header(decode_header(frames[0].buffer, len(frames)), frames[1:], now)
        except MalformedMessage:
            return  # not from our server, so it does not count as received
        self.last_received_time = now

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        """Send a message of the current session; drop a message of an earlier one."""
        session_number, header, body = command
        if session_number == self.session_number:
            self.stream.enqueue(header, body)
            self._flush()

    def tick(self, now: float) -> float:
        """Connect or send a heartbeat, notice a lost connection, and return the seconds until the next call."""
        interval = self._settings.heartbeat_interval
        self.last_received_time = min(now, (self.last_received_time or now) + self._measure_pause(now))
        if self.state is ConnectionState.REJECTED:
            return interval
        if now - self.last_received_time > self._settings.server_timeout and not self._loss_reported:
            self._loss_reported, self.state = True, ConnectionState.CONNECTING
            self.events.append(("lost", f"no message for {self._settings.server_timeout:g} s"))
        if self.state is ConnectionState.CONNECTING:
            hello_interval = min(HELLO_INTERVAL * 2**self._hello_attempts, interval)
            if now - self._last_sent_time >= hello_interval and self._send_hello():
                self._last_sent_time, self._hello_attempts = now, min(self._hello_attempts + 1, 10)
            return HELLO_INTERVAL / 2
        if now - self._last_sent_time >= interval:
            self._last_sent_time = now
            self._flush()
            self._send_header(make_heartbeat(self.stream, self._loop_monitor))
        return min(interval / 4, 0.25)

    def send_goodbye(self) -> None:
        """Send what is pending, then tell the server that this client leaves."""
        self.goodbye_done = self.state is not ConnectionState.CONNECTED
        self._closing = True
        self._flush()
        self._send_header(GoodbyeHeader())

    def _handle_header(self, header: AnyHeader, body: Sequence[zmq.Frame], now: float) -> None:
        match header:
            case WelcomeHeader(hello_number=number) if 0 < number < self._num_hellos:
                self._last_sent_time = now + self._settings.heartbeat_interval  # wait for the welcome to a later hello
            case WelcomeHeader():
                self._handle_welcome(header)
            case PartHeader() | ReplyHeader() | FailureHeader():
                self._handle_sequenced(header, body)
            case HeartbeatHeader():
                self.last_heartbeat = header
                self.stream.handle_ack(min(header.ack, self.stream.enqueued))
                if header.last_sent > self.stream.received and self.state is ConnectionState.CONNECTED:
                    self._send_header(ResendHeader(self.stream.received))
            case ResendHeader():
                self.stream.resend_after(min(header.ack, self.stream.enqueued))
                self._flush()
            case UnknownClientHeader():
                self._restart_handshake()
            case GoodbyeHeader():
                self.goodbye_done = True
                if not self._closing:
                    self._send_header(GoodbyeHeader())
                    self._restart_handshake()
                    self._loss_reported = True
                    self.events.append(("lost", "it has closed the connection"))
            case RejectedHeader():
                self.state = ConnectionState.REJECTED
                self.events.append(("rejected", header.failure))
            case _:
                raise MalformedMessage(f"a server does not send {type(header).__name__}")

    def _handle_welcome(self, welcome: WelcomeHeader) -> None:
        if self._session_id and self._session_id != welcome.session_id:
            self.stream, self.session_number = SequencedStream(), self.session_number + 1
            self.events.append(("session_reset", self.session_number))
        self._session_id, self.max_frame_bytes = welcome.session_id, welcome.max_frame_bytes
        self.state, self._loss_reported, self._hello_attempts = ConnectionState.CONNECTED, False, 0
        self.stream.resend_after(min(welcome.ack, self.stream.enqueued))
        self.events.append(("connected",))
        self._flush()

    def _handle_sequenced(self, header: PartHeader | ReplyHeader | FailureHeader, body: Sequence[zmq.Frame]) -> None:
        if self.state is not ConnectionState.CONNECTED or not self._accept(self.stream, header, self._send_header):
            return
        content = header.failure if isinstance(header, FailureHeader) else WireMessage([frame.buffer for frame in body])
        self.events.append((EVENT_NAMES[type(header)], header.request_id, content))

    def _restart_handshake(self) -> None:
        if self.state is ConnectionState.CONNECTED:
            self.state, self._last_sent_time, self._hello_attempts = ConnectionState.CONNECTING, 0.0, 0

    def _send_hello(self) -> bool:
        proof, number = make_proof(self._secret, self.client_id), self._num_hellos + 1
        hello = HelloHeader(PROTOCOL_VERSION, self.client_id, proof, self.stream.received, self._session_id, number)
        if not self._send_header(hello):
            return False
        self._num_hellos = number
        return True

    def _flush(self) -> None:
        if self.state is ConnectionState.CONNECTED:
            self.stream.flush(self._send)

    def _send_header(self, header: WireHeader) -> bool:
        return self._send([encode_header(header)])
