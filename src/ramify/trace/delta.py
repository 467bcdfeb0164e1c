"""Sending a trace while it grows.

The writer sends what was added since its last delta; the reader puts deltas back together and ends with a trace that
encodes to the same bytes. Deltas are numbered and each says how far the trace had grown before it, so one that was
lost, repeated or overtaken is noticed at once instead of being trained on.
"""

from __future__ import annotations

import msgspec

from ramify.errors import DeltaLost, DeltaRepeated, TraceInvalid
from ramify.trace.codec import ColumnLengths, append_frame, build_trace, encode_frame, parse_frame
from ramify.trace.graph import MessageGraph
from ramify.trace.trace import Trace, TraceHeader


class TraceDeltaEncoder:
    """Cuts a growing trace into deltas."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sent_lengths = ColumnLengths()
        self._sent_header: bytes = b""
        self._next_sequence = 0

    def next_delta(self) -> bytes | None:
        """What is new since the last delta, None if nothing is."""
        mark, header = ColumnLengths.from_graph(self._trace.graph), self._trace.header
        encoded = msgspec.msgpack.encode(header)
        if mark == self._sent_lengths and encoded == self._sent_header:
            return None
        news = header if encoded != self._sent_header else None
        frame = encode_frame(self._trace, since=self._sent_lengths, header=news, sequence=self._next_sequence)
        self._sent_lengths, self._sent_header = mark, encoded
        self._next_sequence += 1
        return frame


class TraceDeltaDecoder:
    """Puts the deltas of one trace together again.

    An attempt that ran again starts over: the first delta of a later attempt replaces all of the earlier one.
    """

    def __init__(self) -> None:
        self._graph = MessageGraph()
        self._header: TraceHeader | None = None
        self._next_sequence = 0

    @property
    def trace(self) -> Trace:
        """The trace as far as it is known. It shares its columns with the reader: read it, do not add to it."""
        if self._header is None:
            raise TraceInvalid("no delta has arrived yet")
        return build_trace(self._header, self._graph)

    def apply(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next delta. Raises DeltaLost, DeltaRepeated or TraceCorrupt and stays as it was."""
        head, columns = parse_frame(data)
        if self._header is not None and head.trace != self._header.id:
            raise TraceInvalid(f"a delta of trace {head.trace!r} came to the reader of {self._header.id!r}")
        graph, expected = self._graph, self._next_sequence
        if self._header is not None and head.attempt != self._header.attempt:
            if head.attempt < self._header.attempt:
                raise DeltaRepeated(f"a delta of attempt {head.attempt} came during attempt {self._header.attempt}")
            graph, expected = MessageGraph(), 0
        if head.sequence < expected:
            raise DeltaRepeated(f"delta {head.sequence} of trace {head.trace!r} was applied already")
        if (
            head.sequence > expected
            or head.since != ColumnLengths.from_graph(graph)
            or (expected == 0 and head.header is None)
        ):
            raise DeltaLost(f"delta {expected} of trace {head.trace!r} is missing, found {head.sequence}")
        if head.header is not None:
            build_trace(head.header, graph)  # a header that makes no sense is refused before anything is changed
        append_frame(graph, head, columns)
        self._graph, self._next_sequence = graph, expected + 1
        if head.header is not None:
            self._header = head.header
