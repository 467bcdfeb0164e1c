"""Ending a sample at a client's stop string.

Engines stop at token ids; a string may end in the middle of one. The sample is cut behind the token in which the string
becomes whole, and the text before the string. The tokens stay what was sampled: a prefix of a sample is a sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ramify.render import Tokenizer
from ramify.trace import Message, VersionRun


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a sample ends, and the string that ended it."""

    num_tokens: int
    stop_string: str

    def truncate(self, message: Message) -> Message:
        """The message without the string and what follows it."""
        if self.stop_string in message.text:
            return replace(message, content=message.text.partition(self.stop_string)[0])
        if message.reasoning and self.stop_string in message.reasoning:
            return replace(message, reasoning=message.reasoning.partition(self.stop_string)[0])
        return message


def find_stop(tokenizer: Tokenizer, token_ids: npt.NDArray[np.int32], stop_strings: Sequence[str]) -> StopMatch | None:
    """The cut at the first of these strings, or None if none occurs."""
    text = tokenizer.decode(token_ids)
    found = [(text.find(stop) + len(stop), stop) for stop in stop_strings if stop in text]
    if not found:
        return None
    _, stop = min(found)
    counts = range(1, len(token_ids) + 1)
    index = bisect_left(counts, True, key=lambda count: stop in tokenizer.decode(token_ids[:count]))
    return StopMatch(counts[min(index, len(counts) - 1)], stop)


def truncate_version_runs(runs: Sequence[VersionRun], num_tokens: int) -> tuple[VersionRun, ...]:
    """The versions of the first `count` tokens."""
    kept: list[VersionRun] = []
    for run in runs:
        share = min(run.count, num_tokens)
        if share:
            kept.append(run if share == run.count else replace(run, count=share))
        num_tokens -= share
    return tuple(kept)
