"""The client's end: one connection to one server, made again whenever it breaks.

    MEETING --Welcome to the last Hello--> MET --silence, or Who--> MEETING
       |
       +--Refused--> REFUSED

A server that comes back without memory gives another session: what was asked in the one before is lost, and whoever
waits for it hears so.
"""

import uuid
from collections.abc import Sequence
from enum import Enum

import zmq

from ramify.wire.address import make_proof
from ramify.wire.headers import (
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
    decode_header,
    encode_header,
)
from ramify.wire.loop_monitor import LoopMonitor
from ramify.wire.message import WireMessage
from ramify.wire.pause_detector import PauseDetector
from ramify.wire.sequenced_stream import SequencedStream
from ramify.wire.server_protocol import ACK_EVERY, make_heartbeat
from ramify.wire.settings import WireSettings
from ramify.wire.socket_driver import ProtocolEvent, make_sender

HELLO_INTERVAL = 0.05  # seconds between two hellos at first
EVENT_NAMES = {PartHeader: "part", ReplyHeader: "reply", FailureHeader: "fail"}


class ConnectionState(Enum):
    """Where a connection is."""

    CONNECTING = "meeting"
    CONNECTED = "met"
    REJECTED = "refused"


class ClientProtocol:
    """One client."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", secret: str | None, settings: WireSettings, loop_monitor: LoopMonitor
    ) -> None:
        self.events: list[ProtocolEvent] = []
        self.client_id = uuid.uuid4().hex
        self.state = ConnectionState.CONNECTING
        self.stream = SequencedStream()
        self.session_number = 0  # the sessions that were lost
        self.last_received_time = 0.0
        self.last_heartbeat = HeartbeatHeader(0, 0)  # the server's last
        self.max_frame_bytes = settings.max_frame_bytes
        self.goodbye_done = False
        self._closing = False
        self._session_id = ""
        self._loss_reported = False
        self._last_sent_time = 0.0  # when a hello or a beat was last sent
        self._hello_attempts = 0  # since the server was last met
        self._num_hellos = 0  # since the start
        self._pause_detector = PauseDetector(settings.server_timeout)
        self._send = make_sender(socket)
        self._secret, self._settings, self._loop_monitor = secret, settings, loop_monitor

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        try:
            self._handle_header(decode_header(frames[0].buffer, len(frames)), frames[1:], now)
        except MalformedMessage:
            return  # not from a server of ours; silence will tell
        self.last_received_time = now

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        epoch, header, body = command
        if epoch == self.session_number:
            self.stream.enqueue(header, body)
            self._flush()

    def tick(self, now: float) -> float:
        interval = self._settings.heartbeat_interval
        self.last_received_time = min(now, (self.last_received_time or now) + self._pause_detector.measure_pause(now))
        if self.state is ConnectionState.REJECTED:
            return interval
        if now - self.last_received_time > self._settings.server_timeout and not self._loss_reported:
            self._loss_reported, self.state = True, ConnectionState.CONNECTING
            self.events.append(("lost", f"it has not been heard for {self._settings.server_timeout:g} s"))
        if self.state is ConnectionState.CONNECTING:
            wait = min(HELLO_INTERVAL * 2**self._hello_attempts, interval)
            if now - self._last_sent_time >= wait and self._send_hello():
                self._last_sent_time, self._hello_attempts = now, min(self._hello_attempts + 1, 10)
            return HELLO_INTERVAL / 2
        if now - self._last_sent_time >= interval:
            self._last_sent_time = now
            self._flush()
            self._send_header(make_heartbeat(self.stream, self._loop_monitor))
        return min(interval / 4, 0.25)

    def send_goodbye(self) -> None:
        self.goodbye_done = self.state is not ConnectionState.CONNECTED
        self._closing = True
        self._flush()
        self._send_header(GoodbyeHeader())

    def _handle_header(self, header: AnyHeader, body: Sequence[zmq.Frame], now: float) -> None:
        match header:
            case WelcomeHeader(hello_number=knock) if 0 < knock < self._num_hellos:
                self._last_sent_time = now + self._settings.heartbeat_interval  # wait for the answers to later hellos
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
                    self.events.append(("lost", "it has closed"))
            case RejectedHeader():
                self.state = ConnectionState.REJECTED
                self.events.append(("refused", header.failure))
            case _:
                raise MalformedMessage(f"a server does not say {type(header).__name__}")

    def _handle_welcome(self, welcome: WelcomeHeader) -> None:
        if self._session_id and self._session_id != welcome.session_id:
            self.stream, self.session_number = SequencedStream(), self.session_number + 1
            self.events.append(("forgotten", self.session_number))
        self._session_id, self.max_frame_bytes = welcome.session_id, welcome.max_frame_bytes
        self.state, self._loss_reported, self._hello_attempts = ConnectionState.CONNECTED, False, 0
        self.stream.resend_after(min(welcome.ack, self.stream.enqueued))
        self.events.append(("met",))
        self._flush()

    def _handle_sequenced(self, header: PartHeader | ReplyHeader | FailureHeader, body: Sequence[zmq.Frame]) -> None:
        if self.state is not ConnectionState.CONNECTED:
            return
        if not self.stream.accept(header):
            if self.stream.needs_resend(header.sequence_number - 1):
                self._send_header(ResendHeader(self.stream.received))
            return
        what = header.failure if isinstance(header, FailureHeader) else WireMessage([frame.buffer for frame in body])
        self.events.append((EVENT_NAMES[type(header)], header.request_id, what))
        if self.stream.received - self.stream.acked >= ACK_EVERY:
            self._send_header(make_heartbeat(self.stream, self._loop_monitor))

    def _restart_handshake(self) -> None:
        """Introduce ourselves anew."""
        if self.state is ConnectionState.CONNECTED:
            self.state, self._last_sent_time, self._hello_attempts = ConnectionState.CONNECTING, 0.0, 0

    def _send_hello(self) -> bool:
        secret_proof, knock = make_proof(self._secret, self.client_id), self._num_hellos + 1
        if not self._send_header(
            HelloHeader(PROTOCOL_VERSION, self.client_id, secret_proof, self.stream.received, self._session_id, knock)
        ):
            return False
        self._num_hellos = knock
        return True

    def _flush(self) -> None:
        if self.state is ConnectionState.CONNECTED:
            self.stream.flush(self._send)

    def _send_header(self, header: WireHeader) -> bool:
        return self._send([encode_header(header)])
