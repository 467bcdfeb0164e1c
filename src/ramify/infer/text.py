"""Token ids to text while they arrive, up to the first stop string.

A character may be spread over several tokens, so text is held back while it ends in an unfinished one; and while its
end could be the beginning of a stop string. To keep each step cheap only the last few tokens are decoded again: text is
settled up to a token that ended on a whole character, and decoding starts there.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
MOST_UNFINISHED = 16  # tokens that are held back for one character; more than that are not the bytes of a character


class TextStream:
    """Feed it ids, it returns the text that is certain."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # everything returned so far
        self.stopped = False
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._settled = 0  # ids whose text is taken
        self._context = 0  # ids before this one no longer matter
        self._held = ""

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings to look for."""
        return bool(self._stops)

    def feed(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The new text. With `last` nothing is held back any more."""
        if self.stopped:
            return ""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context : self._settled])
        whole = self._decode(self._ids[self._context :])
        if last or not whole.endswith(UNFINISHED) or len(self._ids) - self._settled > MOST_UNFINISHED:
            self._held += whole[len(before) :]
            self._context, self._settled = self._settled, len(self._ids)
        return self._give(last)

    def _give(self, last: bool) -> str:
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            ready, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
            cut = len(self._held) - keep
            ready, self._held = self._held[:cut], self._held[cut:]
        self.text += ready
        return ready


def _overlap(text: str, stop: str) -> int:
    """How many last characters of `text` could be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
