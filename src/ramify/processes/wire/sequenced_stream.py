"""One side of a reliable connection: resends what was not acknowledged, ignores duplicates."""

from collections import deque
from collections.abc import Callable, Iterator

from ramify.processes.wire.headers import HeartbeatHeader, MalformedMessage, SequencedHeader, encode_header
from ramify.processes.wire.loop_monitor import LAG_REPORT_THRESHOLD, LoopMonitor
from ramify.processes.wire.message import Frame

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
