"""One side of a connection's two streams: what was sent and may be lost, what has come and may come again."""

from collections import deque
from collections.abc import Callable, Iterator

from ramify.wire.frames import Malformed, Numbered, encode
from ramify.wire.message import Frame

Frames = list[Frame]


class Link:
    """Numbers what goes out and keeps it until it is acknowledged; takes what comes in once, and in order."""

    def __init__(self) -> None:
        self.got = 0  # the last number that came
        self.told = 0  # ... and that the other side was told of
        self.sent = 0  # the last number given out
        self.flushed = 0  # ... and handed to the socket
        self.kept_bytes = 0
        self._asked = -1
        self._kept: deque[tuple[int, Frames]] = deque()
        self._unsent: deque[tuple[int, Frames]] = deque()

    @property
    def kept(self) -> int:
        """Frames that nobody has acknowledged."""
        return len(self._kept)

    def add(self, header: Numbered, body: Iterator[Frame] | tuple[Frame, ...] | list[Frame] = ()) -> None:
        """Give a frame its number and keep it."""
        self.sent += 1
        header.number, header.got = self.sent, self.got
        entry = (self.sent, [encode(header), *body])
        self._kept.append(entry)
        self._unsent.append(entry)
        self.kept_bytes += _size(entry[1])

    def flush(self, send: Callable[[Frames], bool]) -> None:
        """Send what was not sent yet, while `send` takes it."""
        while self._unsent and send(self._unsent[0][1]):
            self.flushed = self._unsent.popleft()[0]
            self.told = self.got

    def acknowledged(self, got: int) -> None:
        """The other side has everything up to here."""
        if got > self.sent:
            raise Malformed(f"frame {got} is acknowledged, {self.sent} were sent")
        while self._kept and self._kept[0][0] <= got:
            self.kept_bytes -= _size(self._kept.popleft()[1])
        while self._unsent and self._unsent[0][0] <= got:
            self._unsent.popleft()

    def rewind(self, got: int) -> None:
        """Send again what came after this frame."""
        self.acknowledged(got)
        self._unsent = deque(self._kept)

    def take(self, header: Numbered) -> bool:
        """Whether this frame is the next one; False for one that came before, or too early."""
        self.acknowledged(header.got)
        if header.number != self.got + 1:
            return False
        self.got = header.number
        return True

    def gap(self, sent: int) -> bool:
        """Whether frames up to `sent` are missing and were not asked for yet."""
        if sent <= self.got or self._asked == self.got:
            return False
        self._asked = self.got
        return True


def _size(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)
