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
from ramify.trace.checks import ARRAY_KINDS
from ramify.trace.columns import MEDIA, NODE, VERSION, Column
from ramify.trace.graph import Graph
from ramify.trace.message import Media
from ramify.trace.trace import SCHEMA, Episode, Header, Trace

_PREFIX = struct.Struct("<4sHHQII")
_MAGIC = b"RMFY"
_CRC_AT = _PREFIX.size - 4
_ALIGN = 8
_DTYPE = re.compile(rf"[<|][{ARRAY_KINDS}][1-9]\d{{0,4}}(\[\w+\])?")

FRAME, EPISODE = 0, 1

Rows = npt.NDArray[Any]

# The columns in the order they travel.
_COLUMNS = {
    "nodes": NODE,
    "tokens": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "records": np.dtype("u1"),
    "versions": VERSION,
    "media_refs": MEDIA,
}


class Mark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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
    def of(cls, graph: Graph) -> Mark:
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


START = Mark()


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an extra array belongs and how to read it; its bytes follow the columns, in this order."""

    node: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class Head(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a frame says before its columns."""

    trace: str
    attempt: int = 0
    sequence: int = 0
    since: Mark = START
    until: Mark = START
    header: Header | None = None  # None: unchanged since the frame before
    policies: list[str] = []
    media: list[Media] = []
    arrays: list[ArrayEntry] = []


_encoder = msgspec.msgpack.Encoder()
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_episode = msgspec.msgpack.Decoder(list[int]).decode


def encode(trace: Trace) -> bytes:
    return encode_frame(trace, header=trace.header)


def decode(data: bytes | bytearray | memoryview) -> Trace:
    """The trace in `data`; its arrays are read-only views over it. Raises TraceCorrupt or SchemaUnsupported."""
    head, columns = open_frame(data)
    if head.header is None or head.since != START:
        raise TraceCorrupt("this is a delta, not a whole trace: reassemble it with TraceReader")
    graph = Graph()
    load_frame(graph, head, columns)
    return make_trace(head.header, graph)


def make_trace(header: Header, graph: Graph) -> Trace:
    try:
        return Trace(**{name: getattr(header, name) for name in Header.__struct_fields__}, graph=graph)
    except ValueRefused as error:
        raise TraceCorrupt(f"the header of trace {header.id!r} makes no sense: {error}") from error


def encode_episode(episode: Episode) -> bytes:
    parts = [encode(trace) for trace in episode.traces]
    return _frame(EPISODE, _encoder.encode([len(part) for part in parts]), parts)


def decode_episode(data: bytes | bytearray | memoryview) -> Episode:
    head, body = _open(data, EPISODE)
    try:
        lengths = _decode_episode(head)
        return Episode(tuple(decode(part) for part in _split(body, lengths)))
    except (msgspec.MsgspecError, TraceInvalid) as error:
        raise TraceCorrupt(f"these are not the traces of an episode: {error}") from error


# -- frames: the nodes of a trace from some mark on ----------------------------------------------------------------


def encode_frame(trace: Trace, *, since: Mark = START, header: Header | None = None, sequence: int = 0) -> bytes:
    graph, until = trace.graph, Mark.of(trace.graph)
    parts: list[memoryview] = []
    for name in _COLUMNS:
        parts.append(_bytes(getattr(graph, name).view[getattr(since, name) :]))
    entries: list[ArrayEntry] = []
    for node in sorted(node for node in graph.arrays if node >= since.nodes):
        for name, array in graph.arrays[node].items():
            entries.append(ArrayEntry(node, name, array.dtype.newbyteorder("<").str, array.shape))
            parts.append(_bytes(array.astype(array.dtype.newbyteorder("<"), copy=False)))
    head = Head(
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
    return _frame(FRAME, _encoder.encode(head), parts)


def open_frame(data: bytes | bytearray | memoryview) -> tuple[Head, list[npt.NDArray[Any]]]:
    """The head and the arrays of a frame (columns first, then the extra arrays), checked to fit together."""
    encoded, body = _open(data, FRAME)
    try:
        head = _decode_head(encoded)
        _check_head(head)
        layout = [(dtype, (getattr(head.until, name) - getattr(head.since, name),)) for name, dtype in _COLUMNS.items()]
        layout += [(np.dtype(entry.dtype), entry.shape) for entry in head.arrays]
        views = _split(body, [dtype.itemsize * math.prod(shape) for dtype, shape in layout])
        parts = zip(views, layout, strict=True)
        return head, [np.frombuffer(view, dtype).reshape(shape) for view, (dtype, shape) in parts]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise TraceCorrupt(f"the head of the frame cannot be read: {error}") from error


def load_frame(graph: Graph, head: Head, columns: Sequence[npt.NDArray[Any]]) -> None:
    """Put a frame's nodes behind those of `graph`, which must have grown exactly to where the frame begins."""
    _check_columns(head, *columns[: len(_COLUMNS)])
    for name, values in zip(_COLUMNS, columns, strict=False):
        column: Column = getattr(graph, name)
        if column.size:
            column.extend(values)
        else:
            setattr(graph, name, Column(values))
    graph.policies.extend(head.policies)
    graph.media.extend(head.media)
    for entry, array in zip(head.arrays, columns[len(_COLUMNS) :], strict=True):
        graph.arrays.setdefault(entry.node, {})[entry.name] = array
    graph.index(head.since.nodes)


def _check_head(head: Head) -> None:
    """What a head promises about its columns and tables."""
    since, until = msgspec.structs.astuple(head.since), msgspec.structs.astuple(head.until)
    grown = (until[-2] - since[-2], until[-1] - since[-1])
    if any(start < 0 or stop < start for start, stop in zip(since, until, strict=True)):
        raise TraceCorrupt(f"the columns of the frame cannot grow from {head.since} to {head.until}")
    if grown != (len(head.policies), len(head.media)):
        raise TraceCorrupt(f"expected {grown} new policies and media, found {len(head.policies)} and {len(head.media)}")
    if head.header is not None and (head.header.id, head.header.attempt) != (head.trace, head.attempt):
        raise TraceCorrupt(f"a frame of {head.trace!r} carries the header of {head.header.id!r}")
    if len({(entry.node, entry.name) for entry in head.arrays}) < len(head.arrays):
        raise TraceCorrupt("an array of a node comes twice")
    for entry in head.arrays:
        sizes = entry.shape
        if not _DTYPE.fullmatch(entry.dtype) or not 1 <= len(sizes) <= 32 or min(sizes) < 0:
            raise TraceCorrupt(f"array {entry.name!r} of node {entry.node} cannot be {entry.dtype!r} of shape {sizes}")


def _check_columns(
    head: Head, nodes: Rows, tokens: Rows, logprobs: Rows, records: Rows, versions: Rows, media: Rows
) -> None:
    """The invariants of the graph, as far as the numbers show them; a record is judged when it is read."""
    own = np.arange(head.since.nodes, head.until.nodes)
    parent, trainable = nodes["parent"], nodes["trainable"]
    good = (parent >= -1) & (parent < own) & (trainable >= 0) & (trainable <= 1)
    sizes = _sizes(nodes["stop"], head.since.tokens, head.until.tokens)
    samples = _sizes(nodes["logprobs_stop"], head.since.logprobs, head.until.logprobs)
    good &= (sizes >= 0) & (samples >= 0) & (_sizes(nodes["record_stop"], head.since.records, head.until.records) >= 0)
    for span in ("sampled", "content"):
        start, stop = nodes[f"{span}_start"], nodes[f"{span}_stop"]
        good &= (start >= 0) & (start <= stop) & (stop <= sizes)
    good &= nodes["sampled_stop"] - nodes["sampled_start"] == samples
    if not good.all():
        raise TraceCorrupt(f"node {int(own[~good][0])} breaks the rules of the message graph")
    if len(tokens) and int(tokens.min()) < 0:
        raise TraceCorrupt("a token id is negative")
    at = _owners(head, versions)
    fits = (versions["policy"] >= 0) & (versions["policy"] < head.until.policies) & (versions["count"] >= 0)
    counts = np.bincount(at, versions["count"], len(nodes))
    if not fits.all() or (counts != samples)[at].any():
        raise TraceCorrupt("the weight versions do not fit the sampled tokens")
    at = _owners(head, media)
    before = np.where(np.diff(at, prepend=-1) == 0, np.roll(media["stop"], 1), 0)
    fits = (media["media"] >= 0) & (media["media"] < head.until.media)
    fits &= (before <= media["start"]) & (media["start"] < media["stop"]) & (media["stop"] <= sizes[at])
    if not fits.all():
        raise TraceCorrupt("the media do not fit their table or their nodes")
    for entry in head.arrays:
        node = entry.node - head.since.nodes
        if not 0 <= node < len(nodes) or entry.shape[0] not in (sizes[node], samples[node]):
            raise TraceCorrupt(f"array {entry.name!r} of shape {entry.shape} does not fit node {entry.node}")


def _sizes(stops: Rows, since: int, until: int) -> Rows:
    """The length of each node's share of a column."""
    if (int(stops[-1]) if len(stops) else since) != until:
        raise TraceCorrupt(f"the nodes' share of a column does not end at {until}")
    return np.diff(stops.astype(np.int64), prepend=since)


def _owners(head: Head, rows: Rows) -> Rows:
    """The nodes that rows of a table belong to, counted from the frame's first."""
    found = rows["node"].astype(np.int64)
    if len(found) and (found[0] < head.since.nodes or found[-1] >= head.until.nodes or (np.diff(found) < 0).any()):
        raise TraceCorrupt("the rows of a table are not in the order of the frame's nodes")
    return found - head.since.nodes


# -- the envelope --------------------------------------------------------------------------------------------------


def _frame(kind: int, head: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    pieces: list[bytes | memoryview] = [b"", head, *_padded(_PREFIX.size + len(head))]
    for part in parts:
        pieces += [part, *_padded(len(part))]
    length = _PREFIX.size + sum(len(piece) for piece in pieces)
    prefix = _PREFIX.pack(_MAGIC, SCHEMA, kind, length, len(head), 0)
    pieces[0] = prefix
    crc = zlib.crc32(prefix[:_CRC_AT])
    for piece in pieces[1:]:
        crc = zlib.crc32(piece, crc)
    pieces[0] = prefix[:_CRC_AT] + struct.pack("<I", crc)
    return b"".join(pieces)


def _open(data: bytes | bytearray | memoryview, expected: int) -> tuple[memoryview, memoryview]:
    """Head and body of a frame whose every byte has been checked."""
    view = memoryview(data).toreadonly().cast("B")
    if len(view) < _PREFIX.size:
        raise TraceCorrupt(f"{len(view)} bytes are too few for a trace")
    magic, schema, kind, length, head_length, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise TraceCorrupt(f"this is not a trace: it begins with {magic!r}, not {_MAGIC!r}")
    if length != len(view) or _PREFIX.size + head_length > length:
        raise TraceCorrupt(f"expected {length} bytes with a head of {head_length}, found {len(view)}")
    if zlib.crc32(view[_PREFIX.size :], zlib.crc32(view[:_CRC_AT])) != crc:
        raise TraceCorrupt(f"the checksum of the {length} bytes does not match")
    if schema > SCHEMA:
        raise SchemaUnsupported(f"this trace has schema {schema}; this version of ramify reads up to {SCHEMA}")
    if schema < 1:
        raise TraceCorrupt(f"there is no schema {schema}")
    if kind != expected:
        raise TraceCorrupt(f"expected a {('frame', 'episode')[expected]}, found kind {kind}")
    head_stop = _PREFIX.size + head_length
    return view[_PREFIX.size : head_stop], view[_up(head_stop) :]


def _split(body: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """The padded parts of a body, which must hold exactly them."""
    views: list[memoryview] = []
    at = 0
    for length in lengths:
        views.append(body[at : at + length])
        at += _up(length)
    if at != len(body) or any(length < 0 for length in lengths):
        raise TraceCorrupt(f"expected columns of {at} bytes, found {len(body)}")
    return views


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _padded(n: int) -> Iterator[bytes]:
    if n % _ALIGN:
        yield bytes(_up(n) - n)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
