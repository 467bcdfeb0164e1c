"""Token ids to text while they arrive, up to the first stop string.

A character may be spread over several tokens, so text is held back while it ends in an unfinished one; and while its
end could be the beginning of a stop string. To keep each step cheap only the last few tokens are decoded again: text is
settled up to a token that ended on a whole character, and decoding starts there.
"""

from collections.abc import Callable, Sequence

REPLACEMENT_CHAR = "\ufffd"
MAX_PENDING_TOKENS = 16  # tokens that are held back for one character; more than that are not the bytes of a character


class IncrementalDetokenizer:
    """Feed it ids, it returns the text that is certain."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self.text = ""  # everything returned so far
        self.stopped = False
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # ids whose text is taken
        self._decode_start = 0  # ids before this one no longer matter
        self._pending_text = ""

    @property
    def has_stop_strings(self) -> bool:
        """Whether there are stop strings to look for."""
        return bool(self._stop_strings)

    def decode_new(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The new text. With `last` nothing is held back any more."""
        if self.stopped:
            return ""
        self._token_ids.extend(token_ids)
        before = self._decode(self._token_ids[self._decode_start : self._num_decoded])
        whole = self._decode(self._token_ids[self._decode_start :])
        if (
            is_last
            or not whole.endswith(REPLACEMENT_CHAR)
            or len(self._token_ids) - self._num_decoded > MAX_PENDING_TOKENS
        ):
            self._pending_text += whole[len(before) :]
            self._decode_start, self._num_decoded = self._num_decoded, len(self._token_ids)
        return self._release_text(is_last)

    def _release_text(self, is_last: bool) -> str:
        found = [at for at in (self._pending_text.find(stop) for stop in self._stop_strings) if at >= 0]
        if found:
            self.stopped = True
            ready, self._pending_text = self._pending_text[: min(found)], ""
        else:
            keep = (
                0
                if is_last
                else max((_partial_stop_length(self._pending_text, stop) for stop in self._stop_strings), default=0)
            )
            cut = len(self._pending_text) - keep
            ready, self._pending_text = self._pending_text[:cut], self._pending_text[cut:]
        self.text += ready
        return ready


def _partial_stop_length(text: str, stop: str) -> int:
    """How many last characters of `text` could be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
