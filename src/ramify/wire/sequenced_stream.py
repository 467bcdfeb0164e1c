"""One side of a connection's two streams: what was sent and may be lost, what has come and may come again."""

from collections import deque
from collections.abc import Callable, Iterator

from ramify.wire.headers import MalformedMessage, SequencedHeader, encode_header
from ramify.wire.message import Frame

Frames = list[Frame]


class SequencedStream:
    """Numbers what goes out and keeps it until it is acknowledged; takes what comes in once, and in order."""

    def __init__(self) -> None:
        self.received = 0  # the last number that came
        self.acked = 0  # ... and that the other side was told of
        self.enqueued = 0  # the last number given out
        self.flushed = 0  # ... and handed to the socket
        self.unacked_bytes = 0
        self._resend_requested_after = -1
        self._unacked: deque[tuple[int, Frames]] = deque()
        self._unsent: deque[tuple[int, Frames]] = deque()

    @property
    def num_unacked(self) -> int:
        """Frames that nobody has acknowledged."""
        return len(self._unacked)

    def enqueue(self, header: SequencedHeader, body: Iterator[Frame] | tuple[Frame, ...] | list[Frame] = ()) -> None:
        """Give a frame its number and keep it."""
        self.enqueued += 1
        header.sequence_number, header.ack = self.enqueued, self.received
        entry = (self.enqueued, [encode_header(header), *body])
        self._unacked.append(entry)
        self._unsent.append(entry)
        self.unacked_bytes += _total_bytes(entry[1])

    def flush(self, send: Callable[[Frames], bool]) -> None:
        """Send what was not sent yet, while `send` takes it."""
        while self._unsent and send(self._unsent[0][1]):
            self.flushed = self._unsent.popleft()[0]
            self.acked = self.received

    def handle_ack(self, ack: int) -> None:
        """The other side has everything up to here."""
        if ack > self.enqueued:
            raise MalformedMessage(f"frame {ack} is acknowledged, {self.enqueued} were sent")
        while self._unacked and self._unacked[0][0] <= ack:
            self.unacked_bytes -= _total_bytes(self._unacked.popleft()[1])
        while self._unsent and self._unsent[0][0] <= ack:
            self._unsent.popleft()

    def resend_after(self, ack: int) -> None:
        """Send again what came after this frame."""
        self.handle_ack(ack)
        self._unsent = deque(self._unacked)

    def accept(self, header: SequencedHeader) -> bool:
        """Whether this frame is the next one; False for one that came before, or too early."""
        self.handle_ack(header.ack)
        if header.sequence_number != self.received + 1:
            return False
        self.received = header.sequence_number
        return True

    def needs_resend(self, last_sent: int) -> bool:
        """Whether frames up to `sent` are missing and were not asked for yet."""
        if last_sent <= self.received or self._resend_requested_after == self.received:
            return False
        self._resend_requested_after = self.received
        return True


def _total_bytes(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)
