"""Output of a program, of which a bounded part is kept: how it began and how it ended."""


class Kept:
    """The first and the last bytes of a stream, half of the limit each."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._first = bytearray()
        self._last = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        excess = len(self._last) - self._half
        if excess > 0:
            del self._last[:excess]
            self._left_out += excess

    def bytes(self) -> bytes:
        """What was kept, with a note where something is missing."""
        if not self._left_out:
            return bytes(self._first + self._last)
        return bytes(self._first) + f"\n[{self._left_out} bytes left out]\n".encode() + bytes(self._last)
