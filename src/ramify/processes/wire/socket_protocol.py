"""The base of both sides of a connection: sends messages, acknowledges what arrives and measures pauses.

A process that did not run, because it was stopped or got no CPU time, could not receive anything. So this time does not
count as silence of the peer: a server that was stopped for a minute must not close its sessions, and a client must not
report its server as lost.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from ramify.processes.wire.loop_monitor import LAG_REPORT_THRESHOLD, LoopMonitor
from ramify.processes.wire.message import (
    Frame,
    HeartbeatHeader,
    MalformedMessage,
    ResendHeader,
    SequencedHeader,
    WireHeader,
    WireSettings,
    encode_header,
)

ACK_EVERY = 16  # messages received after which an acknowledgement is sent without waiting for the next heartbeat

Frames = list[Frame]


class SequencedStream:
    """Numbers outgoing messages and keeps them until they are acknowledged; accepts incoming ones once and in order.

    Sequence numbers start at 1: `received` is the last one accepted and `acked` the last of these that was acknowledged
    to the peer; `enqueued` is the last one assigned and `flushed` the last one handed to the socket.
    """

    def __init__(self) -> None:
        self.received = self.acked = 0
        self.enqueued = self.flushed = 0
        self.unacked_bytes = 0
        self._resend_requested_after = -1
        self._unacked: deque[tuple[int, Frames]] = deque()
        self._unsent: deque[tuple[int, Frames]] = deque()

    @property
    def num_unacked(self) -> int:
        """The number of messages that the peer has not acknowledged."""
        return len(self._unacked)

    def enqueue(self, header: SequencedHeader, body: Iterator[Frame] | tuple[Frame, ...] | list[Frame] = ()) -> None:
        """Assign the next number to a message and queue it for `flush`."""
        self.enqueued += 1
        header.sequence_number, header.ack = self.enqueued, self.received
        frames = [encode_header(header), *body]
        self._unacked.append((self.enqueued, frames))
        self._unsent.append((self.enqueued, frames))
        self.unacked_bytes += _total_bytes(frames)

    def flush(self, send: Callable[[Frames], bool]) -> None:
        """Send the queued messages until `send` returns False."""
        while self._unsent and send(self._unsent[0][1]):
            self.flushed = self._unsent.popleft()[0]
            self.acked = self.received

    def handle_ack(self, ack: int) -> None:
        """Release all messages up to number `ack`, which the peer has received."""
        if ack > self.enqueued:
            raise MalformedMessage(f"message {ack} is acknowledged, but only {self.enqueued} were sent")
        while self._unacked and self._unacked[0][0] <= ack:
            self.unacked_bytes -= _total_bytes(self._unacked.popleft()[1])
        while self._unsent and self._unsent[0][0] <= ack:
            self._unsent.popleft()

    def resend_after(self, ack: int) -> None:
        """Queue all messages after number `ack` for sending again."""
        self.handle_ack(ack)
        self._unsent = deque(self._unacked)

    def accept(self, header: SequencedHeader) -> bool:
        """Whether the message is the next one in order; return False for a repeated one or one after a gap."""
        self.handle_ack(header.ack)
        if header.sequence_number != self.received + 1:
            return False
        self.received = header.sequence_number
        return True

    def needs_resend(self, last_sent: int) -> bool:
        """Whether messages up to number `last_sent` are missing and a resend was not requested yet."""
        if last_sent <= self.received or self._resend_requested_after == self.received:
            return False
        self._resend_requested_after = self.received
        return True


def make_heartbeat(stream: SequencedStream, loop_monitor: LoopMonitor) -> HeartbeatHeader:
    """Return a heartbeat that acknowledges what was received and reports the lag of the event loop."""
    lag = loop_monitor.lag
    task, stack = loop_monitor.inspect_running_task() if lag > LAG_REPORT_THRESHOLD else ("", "")
    stream.acked = stream.received
    return HeartbeatHeader(stream.received, stream.flushed, lag, task, stack)


def _total_bytes(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)


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
