"""Truncate a sample at a client's stop string.

Engines stop at token ids, but a string may end inside a token. The tokens are truncated after the token that completes
the string, and the text before the string. A prefix of a sample is still an exact sample.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ramify.model.render import Tokenizer
from ramify.trace import Message


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The number of tokens up to the end of a stop string, and the string."""

    num_tokens: int
    stop_string: str

    def truncate(self, message: Message, prefill: str = "") -> Message:
        """Return the message without the stop string and the text after it; a stop string in `prefill` stays."""
        start = len(prefill) if message.text.startswith(prefill) else 0
        if (stop := message.text.find(self.stop_string, start)) >= 0:
            return replace(message, content=message.text[:stop])
        if message.reasoning and self.stop_string in message.reasoning:
            return replace(message, reasoning=message.reasoning.partition(self.stop_string)[0])
        return message


def find_stop(tokenizer: Tokenizer, token_ids: npt.NDArray[np.int32], stop_strings: Sequence[str]) -> StopMatch | None:
    """Return the match of the stop string that ends first, or None."""
    text = tokenizer.decode(token_ids)
    matches = [(text.find(stop) + len(stop), stop) for stop in stop_strings if stop in text]
    if not matches:
        return None
    _, stop = min(matches)
    counts = range(1, len(token_ids) + 1)
    index = bisect_left(counts, True, key=lambda count: stop in tokenizer.decode(token_ids[:count]))
    return StopMatch(counts[min(index, len(counts) - 1)], stop)
