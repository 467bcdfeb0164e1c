"""Sends a trace while it grows.

The encoder sends what was added since its last delta; the decoder appends the deltas and ends with a trace that encodes
to the same bytes. Deltas are numbered, and each states the column lengths before it, so a lost, repeated or reordered
delta is detected.
"""

import msgspec

from ramify.core.errors import DataCorrupt, OperationInvalid
from ramify.trace.codec import ColumnLengths, append_frame, build_trace, encode_frame, parse_frame
from ramify.trace.graph import MessageGraph
from ramify.trace.header import TraceHeader
from ramify.trace.trace import Trace


class TraceDeltaEncoder:
    """Encodes a growing trace as a sequence of deltas."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sent_lengths = ColumnLengths()
        self._sent_header: bytes = b""
        self._next_sequence = 0

    def next_delta(self) -> bytes | None:
        """Return what was added since the last delta, or None if nothing was."""
        lengths, header = ColumnLengths.from_graph(self._trace.graph), self._trace.header
        encoded = msgspec.msgpack.encode(header)
        if lengths == self._sent_lengths and encoded == self._sent_header:
            return None
        changed_header = header if encoded != self._sent_header else None
        frame = encode_frame(self._trace, since=self._sent_lengths, header=changed_header, sequence=self._next_sequence)
        self._sent_lengths, self._sent_header = lengths, encoded
        self._next_sequence += 1
        return frame


class TraceDeltaDecoder:
    """Decodes the deltas of one trace.

    The first delta of a later attempt replaces everything of the earlier attempt.
    """

    def __init__(self) -> None:
        self._graph = MessageGraph()
        self._header: TraceHeader | None = None
        self._next_sequence = 0

    @property
    def trace(self) -> Trace:
        """The trace so far. It shares its columns with the decoder and must not be modified."""
        if self._header is None:
            raise OperationInvalid("no delta has been received yet")
        return build_trace(self._header, self._graph)

    def apply(self, data: bytes | bytearray | memoryview) -> None:
        """Append the next delta.

        Raises DataCorrupt or OperationInvalid; the trace is then unchanged.
        """
        frame_header, columns = parse_frame(data)
        trace, attempt, sequence = frame_header.trace, frame_header.attempt, frame_header.sequence
        graph, expected = self._graph, self._next_sequence
        if self._header is not None:
            if trace != self._header.id:
                raise OperationInvalid(f"expected a delta of trace {self._header.id!r}, found one of {trace!r}")
            if attempt < self._header.attempt:
                raise DataCorrupt(f"a delta of attempt {attempt} arrived during attempt {self._header.attempt}")
            if attempt > self._header.attempt:
                graph, expected = MessageGraph(), 0
        if sequence < expected:
            raise DataCorrupt(f"delta {sequence} of trace {trace!r} was already applied")
        is_gap = sequence > expected or frame_header.since != ColumnLengths.from_graph(graph)
        if is_gap or (expected == 0 and frame_header.header is None):
            raise DataCorrupt(f"delta {expected} of trace {trace!r} is missing, found {sequence}")
        if frame_header.header is not None:
            build_trace(frame_header.header, graph)  # raises if a field is invalid, before anything is changed
        append_frame(graph, frame_header, columns)
        self._graph, self._next_sequence = graph, expected + 1
        if frame_header.header is not None:
            self._header = frame_header.header
