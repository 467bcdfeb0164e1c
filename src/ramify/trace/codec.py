"""The binary form of a trace: one buffer, decoded without copying.

    magic "RMFY" | schema u16 | kind u16 | length u64 | head length u32 | crc32 u32 | head (msgpack) | columns

The columns follow the head in a fixed order, each aligned to 8 bytes, exactly as they lie in memory: encoding is one
join, decoding hands out numpy views over the received bytes. The checksum covers every byte but itself, so a flipped or
missing one is refused before anything is believed.

A frame holds what came after the mark `since`. A whole trace is the frame that starts at 0; a delta is one that does
not have to (see `delta`). Offsets in the node table always count from the start of the trace.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import SchemaUnsupported, TraceCorrupt, TraceInvalid, ValueRefused
from ramify.trace.columns import MEDIA_DTYPE, NODE_DTYPE, VERSION_DTYPE, Column
from ramify.trace.graph import MessageGraph
from ramify.trace.message import Media
from ramify.trace.node_checks import ARRAY_DTYPE_KINDS
from ramify.trace.trace import TRACE_SCHEMA, Episode, Trace, TraceHeader

_PREFIX = struct.Struct("<4sHHQII")
_MAGIC = b"RMFY"
_CRC_OFFSET = _PREFIX.size - 4
_ALIGNMENT = 8
_DTYPE_RE = re.compile(rf"[<|][{ARRAY_DTYPE_KINDS}][1-9]\d{{0,4}}(\[\w+\])?")

FRAME_KIND, EPISODE_KIND = 0, 1

StructuredArray = npt.NDArray[Any]

# The columns in the order they travel.
_COLUMNS = {
    "nodes": NODE_DTYPE,
    "tokens": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "records": np.dtype("u1"),
    "versions": VERSION_DTYPE,
    "media_refs": MEDIA_DTYPE,
}


class ColumnLengths(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far a graph had grown: the length of each of its columns and tables."""

    nodes: int = 0
    tokens: int = 0
    logprobs: int = 0
    records: int = 0
    versions: int = 0
    media_refs: int = 0
    policies: int = 0
    media: int = 0

    @classmethod
    def from_graph(cls, graph: MessageGraph) -> ColumnLengths:
        return cls(
            nodes=graph.nodes.size,
            tokens=graph.tokens.size,
            logprobs=graph.logprobs.size,
            records=graph.records.size,
            versions=graph.versions.size,
            media_refs=graph.media_refs.size,
            policies=len(graph.policies),
            media=len(graph.media),
        )


EMPTY_LENGTHS = ColumnLengths()


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an extra array belongs and how to read it; its bytes follow the columns, in this order."""

    node: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class TraceFrameHeader(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a frame says before its columns."""

    trace: str
    attempt: int = 0
    sequence: int = 0
    since: ColumnLengths = EMPTY_LENGTHS
    until: ColumnLengths = EMPTY_LENGTHS
    header: TraceHeader | None = None  # None: unchanged since the frame before
    policies: list[str] = []
    media: list[Media] = []
    arrays: list[ArraySpec] = []


_encoder = msgspec.msgpack.Encoder()
_decode_frame_header = msgspec.msgpack.Decoder(TraceFrameHeader).decode
_decode_lengths = msgspec.msgpack.Decoder(list[int]).decode


def encode_trace(trace: Trace) -> bytes:
    return encode_frame(trace, header=trace.header)


def decode_trace(data: bytes | bytearray | memoryview) -> Trace:
    """The trace in `data`; its arrays are read-only views over it. Raises TraceCorrupt or SchemaUnsupported."""
    head, columns = parse_frame(data)
    if head.header is None or head.since != EMPTY_LENGTHS:
        raise TraceCorrupt("this is a delta, not a whole trace: reassemble it with TraceReader")
    graph = MessageGraph()
    append_frame(graph, head, columns)
    return build_trace(head.header, graph)


def build_trace(header: TraceHeader, graph: MessageGraph) -> Trace:
    try:
        return Trace(**{name: getattr(header, name) for name in TraceHeader.__struct_fields__}, graph=graph)
    except ValueRefused as error:
        raise TraceCorrupt(f"the header of trace {header.id!r} makes no sense: {error}") from error


def encode_episode(episode: Episode) -> bytes:
    parts = [encode_trace(trace) for trace in episode.traces]
    return _build_envelope(EPISODE_KIND, _encoder.encode([len(part) for part in parts]), parts)


def decode_episode(data: bytes | bytearray | memoryview) -> Episode:
    head, body = _parse_envelope(data, EPISODE_KIND)
    try:
        lengths = _decode_lengths(head)
        return Episode(tuple(decode_trace(part) for part in _split_body(body, lengths)))
    except (msgspec.MsgspecError, TraceInvalid) as error:
        raise TraceCorrupt(f"these are not the traces of an episode: {error}") from error


# -- frames: the nodes of a trace from some mark on ----------------------------------------------------------------


def encode_frame(
    trace: Trace, *, since: ColumnLengths = EMPTY_LENGTHS, header: TraceHeader | None = None, sequence: int = 0
) -> bytes:
    graph, until = trace.graph, ColumnLengths.from_graph(trace.graph)
    parts: list[memoryview] = []
    for name in _COLUMNS:
        parts.append(_byte_view(getattr(graph, name).view[getattr(since, name) :]))
    entries: list[ArraySpec] = []
    for node in sorted(node for node in graph.arrays if node >= since.nodes):
        for name, array in graph.arrays[node].items():
            entries.append(ArraySpec(node, name, array.dtype.newbyteorder("<").str, array.shape))
            parts.append(_byte_view(array.astype(array.dtype.newbyteorder("<"), copy=False)))
    head = TraceFrameHeader(
        trace=trace.id,
        attempt=trace.attempt,
        sequence=sequence,
        since=since,
        until=until,
        header=header,
        policies=graph.policies[since.policies :],
        media=graph.media[since.media :],
        arrays=entries,
    )
    return _build_envelope(FRAME_KIND, _encoder.encode(head), parts)


def parse_frame(data: bytes | bytearray | memoryview) -> tuple[TraceFrameHeader, list[npt.NDArray[Any]]]:
    """The head and the arrays of a frame (columns first, then the extra arrays), checked to fit together."""
    encoded, body = _parse_envelope(data, FRAME_KIND)
    try:
        head = _decode_frame_header(encoded)
        _check_frame_header(head)
        layout = [(dtype, (getattr(head.until, name) - getattr(head.since, name),)) for name, dtype in _COLUMNS.items()]
        layout += [(np.dtype(entry.dtype), entry.shape) for entry in head.arrays]
        views = _split_body(body, [dtype.itemsize * math.prod(shape) for dtype, shape in layout])
        parts = zip(views, layout, strict=True)
        return head, [np.frombuffer(view, dtype).reshape(shape) for view, (dtype, shape) in parts]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise TraceCorrupt(f"the head of the frame cannot be read: {error}") from error


def append_frame(graph: MessageGraph, frame_header: TraceFrameHeader, columns: Sequence[npt.NDArray[Any]]) -> None:
    """Put a frame's nodes behind those of `graph`, which must have grown exactly to where the frame begins."""
    _check_columns(frame_header, *columns[: len(_COLUMNS)])
    for name, values in zip(_COLUMNS, columns, strict=False):
        column: Column = getattr(graph, name)
        if column.size:
            column.extend(values)
        else:
            setattr(graph, name, Column(values))
    graph.policies.extend(frame_header.policies)
    graph.media.extend(frame_header.media)
    for entry, array in zip(frame_header.arrays, columns[len(_COLUMNS) :], strict=True):
        graph.arrays.setdefault(entry.node, {})[entry.name] = array
    graph.index_runs(frame_header.since.nodes)


def _check_frame_header(frame_header: TraceFrameHeader) -> None:
    """What a head promises about its columns and tables."""
    since, until = msgspec.structs.astuple(frame_header.since), msgspec.structs.astuple(frame_header.until)
    grown = (until[-2] - since[-2], until[-1] - since[-1])
    if any(start < 0 or stop < start for start, stop in zip(since, until, strict=True)):
        raise TraceCorrupt(f"the columns of the frame cannot grow from {frame_header.since} to {frame_header.until}")
    if grown != (len(frame_header.policies), len(frame_header.media)):
        raise TraceCorrupt(
            f"expected {grown} new policies and media, found {len(frame_header.policies)} and {len(frame_header.media)}"
        )
    if frame_header.header is not None and (frame_header.header.id, frame_header.header.attempt) != (
        frame_header.trace,
        frame_header.attempt,
    ):
        raise TraceCorrupt(f"a frame of {frame_header.trace!r} carries the header of {frame_header.header.id!r}")
    if len({(entry.node, entry.name) for entry in frame_header.arrays}) < len(frame_header.arrays):
        raise TraceCorrupt("an array of a node comes twice")
    for entry in frame_header.arrays:
        sizes = entry.shape
        if not _DTYPE_RE.fullmatch(entry.dtype) or not 1 <= len(sizes) <= 32 or min(sizes) < 0:
            raise TraceCorrupt(f"array {entry.name!r} of node {entry.node} cannot be {entry.dtype!r} of shape {sizes}")


def _check_columns(
    frame_header: TraceFrameHeader,
    nodes: StructuredArray,
    tokens: StructuredArray,
    logprobs: StructuredArray,
    records: StructuredArray,
    versions: StructuredArray,
    media_refs: StructuredArray,
) -> None:
    """The invariants of the graph, as far as the numbers show them; a record is judged when it is read."""
    own = np.arange(frame_header.since.nodes, frame_header.until.nodes)
    parent, trainable = nodes["parent"], nodes["trainable"]
    good = (parent >= -1) & (parent < own) & (trainable >= 0) & (trainable <= 1)
    sizes = _node_sizes(nodes["stop"], frame_header.since.tokens, frame_header.until.tokens)
    samples = _node_sizes(nodes["logprobs_stop"], frame_header.since.logprobs, frame_header.until.logprobs)
    good &= (
        (sizes >= 0)
        & (samples >= 0)
        & (_node_sizes(nodes["record_stop"], frame_header.since.records, frame_header.until.records) >= 0)
    )
    for span in ("sampled", "content"):
        start, stop = nodes[f"{span}_start"], nodes[f"{span}_stop"]
        good &= (start >= 0) & (start <= stop) & (stop <= sizes)
    good &= nodes["sampled_stop"] - nodes["sampled_start"] == samples
    if not good.all():
        raise TraceCorrupt(f"node {int(own[~good][0])} breaks the rules of the message graph")
    if len(tokens) and int(tokens.min()) < 0:
        raise TraceCorrupt("a token id is negative")
    at = _owner_nodes(frame_header, versions)
    fits = (versions["policy"] >= 0) & (versions["policy"] < frame_header.until.policies) & (versions["count"] >= 0)
    counts = np.bincount(at, versions["count"], len(nodes))
    if not fits.all() or (counts != samples)[at].any():
        raise TraceCorrupt("the weight versions do not fit the sampled tokens")
    at = _owner_nodes(frame_header, media_refs)
    before = np.where(np.diff(at, prepend=-1) == 0, np.roll(media_refs["stop"], 1), 0)
    fits = (media_refs["media"] >= 0) & (media_refs["media"] < frame_header.until.media)
    fits &= (
        (before <= media_refs["start"]) & (media_refs["start"] < media_refs["stop"]) & (media_refs["stop"] <= sizes[at])
    )
    if not fits.all():
        raise TraceCorrupt("the media do not fit their table or their nodes")
    for entry in frame_header.arrays:
        node = entry.node - frame_header.since.nodes
        if not 0 <= node < len(nodes) or entry.shape[0] not in (sizes[node], samples[node]):
            raise TraceCorrupt(f"array {entry.name!r} of shape {entry.shape} does not fit node {entry.node}")


def _node_sizes(stops: StructuredArray, since: int, until: int) -> StructuredArray:
    """The length of each node's share of a column."""
    if (int(stops[-1]) if len(stops) else since) != until:
        raise TraceCorrupt(f"the nodes' share of a column does not end at {until}")
    return np.diff(stops.astype(np.int64), prepend=since)


def _owner_nodes(frame_header: TraceFrameHeader, rows: StructuredArray) -> StructuredArray:
    """The nodes that rows of a table belong to, counted from the frame's first."""
    found = rows["node"].astype(np.int64)
    if len(found) and (
        found[0] < frame_header.since.nodes or found[-1] >= frame_header.until.nodes or (np.diff(found) < 0).any()
    ):
        raise TraceCorrupt("the rows of a table are not in the order of the frame's nodes")
    return found - frame_header.since.nodes


# -- the envelope --------------------------------------------------------------------------------------------------


def _build_envelope(kind: int, header: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    pieces: list[bytes | memoryview] = [b"", header, *_make_padding(_PREFIX.size + len(header))]
    for part in parts:
        pieces += [part, *_make_padding(len(part))]
    length = _PREFIX.size + sum(len(piece) for piece in pieces)
    prefix = _PREFIX.pack(_MAGIC, TRACE_SCHEMA, kind, length, len(header), 0)
    pieces[0] = prefix
    crc = zlib.crc32(prefix[:_CRC_OFFSET])
    for piece in pieces[1:]:
        crc = zlib.crc32(piece, crc)
    pieces[0] = prefix[:_CRC_OFFSET] + struct.pack("<I", crc)
    return b"".join(pieces)


def _parse_envelope(data: bytes | bytearray | memoryview, expected_kind: int) -> tuple[memoryview, memoryview]:
    """Head and body of a frame whose every byte has been checked."""
    view = memoryview(data).toreadonly().cast("B")
    if len(view) < _PREFIX.size:
        raise TraceCorrupt(f"{len(view)} bytes are too few for a trace")
    magic, schema, kind, length, head_length, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise TraceCorrupt(f"this is not a trace: it begins with {magic!r}, not {_MAGIC!r}")
    if length != len(view) or _PREFIX.size + head_length > length:
        raise TraceCorrupt(f"expected {length} bytes with a head of {head_length}, found {len(view)}")
    if zlib.crc32(view[_PREFIX.size :], zlib.crc32(view[:_CRC_OFFSET])) != crc:
        raise TraceCorrupt(f"the checksum of the {length} bytes does not match")
    if schema > TRACE_SCHEMA:
        raise SchemaUnsupported(f"this trace has schema {schema}; this version of ramify reads up to {TRACE_SCHEMA}")
    if schema < 1:
        raise TraceCorrupt(f"there is no schema {schema}")
    if kind != expected_kind:
        raise TraceCorrupt(f"expected a {('frame', 'episode')[expected_kind]}, found kind {kind}")
    head_stop = _PREFIX.size + head_length
    return view[_PREFIX.size : head_stop], view[_align_up(head_stop) :]


def _split_body(body: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """The padded parts of a body, which must hold exactly them."""
    views: list[memoryview] = []
    at = 0
    for length in lengths:
        views.append(body[at : at + length])
        at += _align_up(length)
    if at != len(body) or any(length < 0 for length in lengths):
        raise TraceCorrupt(f"expected columns of {at} bytes, found {len(body)}")
    return views


def _align_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _make_padding(num_bytes: int) -> Iterator[bytes]:
    if num_bytes % _ALIGNMENT:
        yield bytes(_align_up(num_bytes) - num_bytes)


def _byte_view(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
