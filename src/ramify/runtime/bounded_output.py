"""Output of a program, of which a bounded part is kept: how it began and how it ended."""


class BoundedOutput:
    """The first and the last bytes of a stream, half of the limit each."""

    def __init__(self, limit: int) -> None:
        self._half_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0

    def write(self, data: bytes) -> None:
        room = self._half_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        excess = len(self._tail) - self._half_limit
        if excess > 0:
            del self._tail[:excess]
            self._num_dropped += excess

    def getvalue(self) -> bytes:
        """What was kept, with a note where something is missing."""
        if not self._num_dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + f"\n[{self._num_dropped} bytes left out]\n".encode() + bytes(self._tail)
