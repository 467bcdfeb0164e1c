"""The base of both sides of a connection: sends messages, acknowledges what arrives and measures pauses.

A process that did not run, because it was stopped or got no CPU time, could not receive anything. So this time does not
count as silence of the peer: a server that was stopped for a minute must not close its sessions, and a client must not
report its server as lost.
"""

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ramify.processes.wire.headers import ResendHeader, SequencedHeader, WireHeader
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import WireSettings
from ramify.processes.wire.sequenced_stream import ACK_EVERY, Frames, SequencedStream, make_heartbeat

ProtocolEvent = tuple[Any, ...]


class SocketProtocol:
    """One side of the connections of a socket, used by one thread at a time.

    A pause between two ticks counts only if it is longer than a quarter of `silence_limit`, the silence that is
    allowed: a process that is always a little late must still notice that its peer is gone.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        secret: str | None,
        settings: WireSettings,
        loop_monitor: LoopMonitor,
        silence_limit: float,
    ) -> None:
        self.events: list[ProtocolEvent] = []
        """Events for the event loop; the driver takes them from this list."""
        self.goodbye_done = False
        """Whether all peers have answered the goodbye."""
        self._socket, self._secret, self._settings, self._loop_monitor = socket, secret, settings, loop_monitor
        self._closing = False
        self._min_pause = silence_limit / 4
        self._last_tick: float | None = None

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """Handle a received message."""
        raise NotImplementedError

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        """Handle a command that the event loop has submitted."""
        raise NotImplementedError

    def tick(self, now: float) -> float:
        """Run the timers that are due, and return the seconds until the next call."""
        raise NotImplementedError

    def send_goodbye(self) -> None:
        """Tell the peers that this side closes."""
        raise NotImplementedError

    def _measure_pause(self, now: float) -> float:
        """Return the seconds since the last tick if they were a pause, else 0."""
        last, self._last_tick = self._last_tick, now
        return now - last if last is not None and now - last > self._min_pause else 0.0

    def _accept(
        self, stream: SequencedStream, header: SequencedHeader, send_header: Callable[[WireHeader], object]
    ) -> bool:
        """Whether the message is the next one of the stream; acknowledge it if due, or request what is missing."""
        if not stream.accept(header):
            if stream.needs_resend(header.sequence_number - 1):
                send_header(ResendHeader(stream.received))
            return False
        if stream.received - stream.acked >= ACK_EVERY:
            send_header(make_heartbeat(stream, self._loop_monitor))
        return True

    def _send(self, frames: Frames) -> bool:
        """Send a message, and return whether the socket accepted it."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True
