"""Incremental detokenization, up to the first stop string.

A character may be spread over several tokens, so text is held back while it ends in an incomplete character, and while
its end could be the beginning of a stop string. To keep each step cheap only the last few tokens are decoded again:
text is final up to a token that ended on a complete character, and decoding starts there.
"""

from collections.abc import Callable, Sequence

REPLACEMENT_CHAR = "\ufffd"  # what an incomplete character is decoded to
MAX_PENDING_TOKENS = 16  # tokens that are held back for one character; more are not the bytes of a character


class IncrementalDetokenizer:
    """Decodes token ids as they arrive. `text` is all text returned so far; `stopped` is set by a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # tokens whose text is final
        self._decode_start = 0  # tokens before this one are not decoded again
        self._pending_text = ""

    def decode_new(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Add tokens and return the new text that is final. With `is_last` nothing is held back."""
        if self.stopped:
            return ""
        self._token_ids.extend(token_ids)
        old_text = self._decode(self._token_ids[self._decode_start : self._num_decoded])
        text = self._decode(self._token_ids[self._decode_start :])
        num_pending = len(self._token_ids) - self._num_decoded
        if is_last or not text.endswith(REPLACEMENT_CHAR) or num_pending > MAX_PENDING_TOKENS:
            self._pending_text += text[len(old_text) :]
            self._decode_start, self._num_decoded = self._num_decoded, len(self._token_ids)
        return self._release_text(is_last)

    def _release_text(self, is_last: bool) -> str:
        pending = self._pending_text
        stop_positions = [position for stop in self._stop_strings if (position := pending.find(stop)) >= 0]
        if stop_positions:
            self.stopped = True
            released, self._pending_text = pending[: min(stop_positions)], ""
        else:
            held_back = [0] if is_last else [0, *(_partial_stop_length(pending, stop) for stop in self._stop_strings)]
            end = len(pending) - max(held_back)
            released, self._pending_text = pending[:end], pending[end:]
        self.text += released
        return released


def _partial_stop_length(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
