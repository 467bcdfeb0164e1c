"""Growing numpy columns.

A trace is stored by column, not by node: all token ids in one int32 buffer, all logprobs in one float32 buffer, one
small table row per node. A chain of nodes is then one contiguous slice, which is what makes verifying a prefix a single
compare, encoding a memcpy and decoding a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

# `stop`, `logprobs_stop` and `record_stop` are where the node's share of a column ends; it begins where the node before
# it ended. Spans count from the node's first token.
NODE_DTYPE = np.dtype(
    [
        ("parent", "<i4"),
        ("stop", "<i4"),
        ("logprobs_stop", "<i4"),
        ("record_stop", "<i4"),
        ("sampled_start", "<i4"),
        ("sampled_stop", "<i4"),
        ("content_start", "<i4"),
        ("content_stop", "<i4"),
        ("trainable", "<i4"),
    ]
)
VERSION_DTYPE = np.dtype(
    [("node", "<i4"), ("policy", "<i4"), ("incarnation", "<i4"), ("step", "<i4"), ("count", "<i4")]
)
MEDIA_DTYPE = np.dtype([("node", "<i4"), ("part", "<i4"), ("media", "<i4"), ("start", "<i4"), ("stop", "<i4")])


class Column:
    """An append-only array. Views handed out stay valid: growing copies into a new buffer and leaves the old one.

    A column may start as a read-only view over received bytes; it turns into memory of its own when it first grows.
    """

    __slots__ = ("_buffer", "_capacity", "size")

    def __init__(self, data: npt.NDArray[Any]) -> None:
        self._buffer = data
        self._capacity = 0  # how much of the buffer is ours to write
        self.size = len(data)

    @property
    def view(self) -> npt.NDArray[Any]:
        return self._buffer[: self.size]

    def reserve(self, count: int) -> npt.NDArray[Any]:
        """Make room for `count` more and return that room, to be filled at once."""
        start, self.size = self.size, self.size + count
        if self.size > self._capacity:
            # Growing by an eighth keeps the slack near a byte a token; the copying stays linear.
            self._capacity = self.size + (self.size >> 3)
            grown = np.empty(self._capacity, self._buffer.dtype)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        return self._buffer[start : self.size]

    def extend(self, values: npt.ArrayLike) -> None:
        array = np.asarray(values, self._buffer.dtype)
        if len(array):
            self.reserve(len(array))[:] = array


def common_prefix_length(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """How many entries two rows begin with in common."""
    n = min(len(first), len(second))
    if n == 0 or first[0] != second[0]:
        return 0
    differ = first[:n] != second[:n]
    at = int(differ.argmax())
    return at if differ[at] else n


def make_readonly(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, which nobody can write to from now on."""
    array.flags.writeable = False
    return array


def concat_tables(tables: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Tables of 32-bit columns one after the other; numpy would first promote the fields of each, which is slow."""
    rows = [np.empty(0, np.int32), *(np.ascontiguousarray(table).view(np.int32) for table in tables)]
    return np.concatenate(rows).view(dtype)


def concat_ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The indices of all [start, start + length) one after the other: ranges([5, 0], [2, 3]) = [5, 6, 0, 1, 2]."""
    stops = np.cumsum(lengths, dtype=np.int64)
    total = int(stops[-1]) if len(stops) else 0
    return np.repeat(starts - stops + lengths, lengths) + np.arange(total, dtype=np.int64)
