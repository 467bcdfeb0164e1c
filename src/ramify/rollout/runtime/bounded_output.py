"""Program output of bounded size: the beginning and the end are kept."""


class BoundedOutput:
    """Keeps the first and the last bytes of a stream, half of the limit each."""

    def __init__(self, limit: int) -> None:
        self._half_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0

    def write(self, data: bytes) -> None:
        """Append data; drop bytes between the head and the tail if there are too many."""
        head_room = self._half_limit - len(self._head)
        self._head += data[:head_room]
        self._tail += data[head_room:]
        excess = len(self._tail) - self._half_limit
        if excess > 0:
            del self._tail[:excess]
            self._num_dropped += excess

    def getvalue(self) -> bytes:
        """Return the kept bytes, with a note in place of dropped ones."""
        if not self._num_dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + f"\n[{self._num_dropped} bytes left out]\n".encode() + bytes(self._tail)
