"""Append-only numpy columns.

A trace is stored by column, not by node: all token ids in one int32 buffer, all logprobs in one float32 buffer, one
small table row per node. A chain of nodes is then one contiguous slice, so that verifying a prefix is a single
comparison, encoding a copy and decoding a view.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
StructuredArray = npt.NDArray[Any]

# `stop`, `logprobs_stop` and `record_stop` are where the node's part of a column ends; it starts where the previous
# node's ends. Spans are relative to the node's first token.
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
MIN_SPARE_ENTRIES = 64  # of a column that grows: a short trace copies its columns a few times only
MAX_DOUBLED_ENTRIES = 1024  # a column that grows doubles up to this many new entries


class Column:
    """An append-only array. Views stay valid: growing copies the values into a new buffer and keeps the old one.

    A column may start as a read-only view of received bytes; it is copied when it first grows.
    """

    __slots__ = ("_buffer", "_capacity", "size")

    def __init__(self, data: npt.NDArray[Any]) -> None:
        self._buffer = data
        self._capacity = 0  # writable entries; 0 for a buffer that is not our own
        self.size = len(data)

    @property
    def view(self) -> npt.NDArray[Any]:
        """The values; writing to them is up to the owner of the column."""
        return self._buffer[: self.size]

    def reserve(self, count: int) -> npt.NDArray[Any]:
        """Append `count` uninitialized entries and return them; the caller must fill them."""
        start, self.size = self.size, self.size + count
        if self.size > self._capacity:
            # Growing by an eighth wastes little memory, and the total cost of copying stays linear.
            self._capacity = self.size + max(self.size >> 3, min(self.size, MAX_DOUBLED_ENTRIES), MIN_SPARE_ENTRIES)
            grown = np.empty(self._capacity, self._buffer.dtype)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        return self._buffer[start : self.size]

    def extend(self, values: npt.ArrayLike) -> None:
        """Append the values."""
        array = np.asarray(values, self._buffer.dtype)
        if len(array):
            self.reserve(len(array))[:] = array


def common_prefix_length(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Return the length of the longest common prefix of two arrays."""
    length = min(len(first), len(second))
    if length == 0 or first[0] != second[0]:
        return 0
    differs = first[:length] != second[:length]
    index = int(differs.argmax())
    return index if differs[index] else length


def make_readonly(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make the array read-only, and return it."""
    array.flags.writeable = False
    return array


def concat_tables(tables: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Concatenate tables of 32-bit columns. `np.concatenate` would first promote their fields, which is slow."""
    rows = [np.empty(0, np.int32), *(np.ascontiguousarray(table).view(np.int32) for table in tables)]
    return np.concatenate(rows).view(dtype)


def concat_ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Concatenate the ranges [start, start + length): concat_ranges([5, 0], [2, 3]) = [5, 6, 0, 1, 2]."""
    stops = np.cumsum(lengths, dtype=np.int64)
    total = int(stops[-1]) if len(stops) else 0
    return np.repeat(starts - stops + lengths, lengths) + np.arange(total, dtype=np.int64)
