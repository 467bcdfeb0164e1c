"""The binary form of a trace: one buffer, decoded without copying.

    magic "RMFY" | schema u16 | kind u16 | length u64 | header length u32 | crc32 u32 | header (msgpack) | columns

The columns follow the header in a fixed order, each aligned to 8 bytes, with the same bytes as in memory: encoding is
one join, decoding returns numpy views of the received bytes. The checksum covers every byte but itself and is verified
before anything else is read.

A trace is one frame. An episode is a frame of another kind that contains the frames of its traces.
"""

import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import DataCorrupt, OperationInvalid
from ramify.trace.columns import MEDIA_DTYPE, NODE_DTYPE, VERSION_DTYPE, Column, StructuredArray
from ramify.trace.graph import MessageGraph
from ramify.trace.header import TRACE_SCHEMA, TraceHeader
from ramify.trace.message import Media
from ramify.trace.node_checks import ARRAY_DTYPE_KINDS
from ramify.trace.trace import Episode, Trace

_PREFIX = struct.Struct("<4sHHQII")
_MAGIC = b"RMFY"
_CRC_OFFSET = _PREFIX.size - 4
ALIGNMENT = 8
_DTYPE_RE = re.compile(rf"[<|][{ARRAY_DTYPE_KINDS}][1-9]\d{{0,4}}(\[\w+\])?")

FRAME_KIND, EPISODE_KIND = 0, 1

# The columns in the order of the format.
_COLUMNS = {
    "nodes": NODE_DTYPE,
    "tokens": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "records": np.dtype("u1"),
    "versions": VERSION_DTYPE,
    "media_refs": MEDIA_DTYPE,
}


class ColumnLengths(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The length of each column and table of a graph."""

    nodes: int = 0
    tokens: int = 0
    logprobs: int = 0
    records: int = 0
    versions: int = 0
    media_refs: int = 0
    policies: int = 0
    media: int = 0

    @classmethod
    def from_graph(cls, graph: MessageGraph) -> "ColumnLengths":
        """Return the current lengths of a graph."""
        sizes = {name: getattr(graph, name).size for name in _COLUMNS}
        return cls(**sizes, policies=len(graph.policies), media=len(graph.media))


EMPTY_LENGTHS = ColumnLengths()


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The node, name, dtype and shape of an extra array; the bytes of all arrays follow the columns, in order."""

    node: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class TraceFrameHeader(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The header of a frame, with the lengths of its columns. Its encoded field names are part of the format."""

    trace: str
    attempt: int = 0
    lengths: ColumnLengths = msgspec.field(name="until", default=EMPTY_LENGTHS)
    header: TraceHeader
    policies: list[str] = []
    media: list[Media] = []
    arrays: list[ArraySpec] = []


_encoder = msgspec.msgpack.Encoder()
_decode_frame_header = msgspec.msgpack.Decoder(TraceFrameHeader).decode
_decode_lengths = msgspec.msgpack.Decoder(list[int]).decode


def encode_trace(trace: Trace) -> bytes:
    """Encode a trace."""
    graph = trace.graph
    parts = [byte_view(getattr(graph, name).view) for name in _COLUMNS]
    array_specs: list[ArraySpec] = []
    for node, arrays in sorted(graph.arrays.items()):
        for name, array in arrays.items():
            array_specs.append(ArraySpec(node, name, array.dtype.newbyteorder("<").str, array.shape))
            parts.append(byte_view(array.astype(array.dtype.newbyteorder("<"), copy=False)))
    frame_header = TraceFrameHeader(
        trace=trace.id,
        attempt=trace.attempt,
        lengths=ColumnLengths.from_graph(graph),
        header=trace.header,
        policies=graph.policies,
        media=graph.media,
        arrays=array_specs,
    )
    return _build_envelope(FRAME_KIND, _encoder.encode(frame_header), parts)


def decode_trace(data: bytes | bytearray | memoryview) -> Trace:
    """Decode a trace; its arrays are read-only views of `data`. Raises DataCorrupt."""
    frame_header, arrays = parse_frame(data)
    columns = dict(zip(_COLUMNS, arrays))
    _check_columns(frame_header, columns)
    graph, header = MessageGraph(), frame_header.header
    for name, values in columns.items():
        setattr(graph, name, Column(values))
    graph.policies, graph.media = frame_header.policies, frame_header.media
    for spec, array in zip(frame_header.arrays, arrays[len(_COLUMNS) :], strict=True):
        graph.arrays.setdefault(spec.node, {})[spec.name] = array
    graph.index_runs()
    try:
        return Trace(**{name: getattr(header, name) for name in TraceHeader.__struct_fields__}, graph=graph)
    except OperationInvalid as error:
        raise DataCorrupt(f"the header of trace {header.id!r} is invalid: {error}") from error


def encode_episode(episode: Episode) -> bytes:
    """Encode the traces of an episode."""
    parts = [encode_trace(trace) for trace in episode.traces]
    return _build_envelope(EPISODE_KIND, _encoder.encode([len(part) for part in parts]), parts)


def decode_episode(data: bytes | bytearray | memoryview) -> Episode:
    """Decode an episode; see `decode_trace`."""
    header, body = _parse_envelope(data, EPISODE_KIND)
    try:
        lengths = _decode_lengths(header)
        return Episode(tuple(decode_trace(part) for part in split_body(body, lengths)))
    except (msgspec.MsgspecError, OperationInvalid) as error:
        raise DataCorrupt(f"the traces of the episode cannot be decoded: {error}") from error


# -- frames --------------------------------------------------------------------------------------------------------


def parse_frame(data: bytes | bytearray | memoryview) -> tuple[TraceFrameHeader, list[npt.NDArray[Any]]]:
    """Return the header and the arrays of a frame, first the columns, then the extra arrays; check their sizes."""
    encoded, body = _parse_envelope(data, FRAME_KIND)
    try:
        frame_header = _decode_frame_header(encoded)
        _check_frame_header(frame_header)
        layout = [(dtype, (getattr(frame_header.lengths, name),)) for name, dtype in _COLUMNS.items()]
        layout += [(np.dtype(spec.dtype), spec.shape) for spec in frame_header.arrays]
        views = split_body(body, [dtype.itemsize * math.prod(shape) for dtype, shape in layout])
        parts = zip(views, layout, strict=True)
        return frame_header, [np.frombuffer(view, dtype).reshape(shape) for view, (dtype, shape) in parts]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise DataCorrupt(f"the header of the frame cannot be read: {error}") from error


def _check_frame_header(frame_header: TraceFrameHeader) -> None:
    """Raise DataCorrupt if the lengths, tables and array specs of the header contradict each other."""
    lengths, header = frame_header.lengths, frame_header.header
    if min(msgspec.structs.astuple(lengths)) < 0:
        raise DataCorrupt(f"the columns of the frame cannot have the lengths {lengths}")
    counts = (len(frame_header.policies), len(frame_header.media))
    if counts != (lengths.policies, lengths.media):
        raise DataCorrupt(f"expected {lengths.policies} policies and {lengths.media} media, got {counts}")
    if not all(media.has_valid_hash for media in frame_header.media):
        raise DataCorrupt("the hash of a media entry is not the SHA-256 of its data")
    if (header.id, header.attempt) != (frame_header.trace, frame_header.attempt):
        raise DataCorrupt(f"a frame of trace {frame_header.trace!r} has the header of trace {header.id!r}")
    if len({(spec.node, spec.name) for spec in frame_header.arrays}) < len(frame_header.arrays):
        raise DataCorrupt("an array of a node is repeated")
    for spec in frame_header.arrays:
        shape = spec.shape
        if not _DTYPE_RE.fullmatch(spec.dtype) or not 1 <= len(shape) <= 32 or min(shape) < 0:
            raise DataCorrupt(f"array {spec.name!r} of node {spec.node} cannot be {spec.dtype!r} of shape {shape}")


def _check_columns(frame_header: TraceFrameHeader, columns: Mapping[str, StructuredArray]) -> None:
    """Raise DataCorrupt if the columns break an invariant of the graph; records are checked when they are read."""
    nodes, tokens, media_refs = columns["nodes"], columns["tokens"], columns["media_refs"]
    if len(tokens) and int(tokens.min()) < 0:
        raise DataCorrupt("a token id is negative")
    num_tokens, num_sampled = _check_rows(frame_header, nodes, columns["versions"])
    if len(media_refs):
        owners = media_refs["node"].astype(np.int64)
        if owners[0] < 0 or owners[-1] >= len(nodes) or (owners[1:] < owners[:-1]).any():
            raise DataCorrupt("the rows of a table are not in the order of the nodes")
        media, start, stop = media_refs["media"], media_refs["start"], media_refs["stop"]
        previous_stop = np.where(np.diff(owners, prepend=-1) == 0, np.roll(stop, 1), 0)
        valid = (media >= 0) & (media < frame_header.lengths.media)
        valid &= (previous_stop <= start) & (start < stop) & (stop <= np.asarray(num_tokens)[owners])
        if not valid.all():
            raise DataCorrupt("the media references do not fit their table or their nodes")
    for spec in frame_header.arrays:
        node = spec.node
        if not 0 <= node < len(nodes) or spec.shape[0] not in (num_tokens[node], num_sampled[node]):
            raise DataCorrupt(f"array {spec.name!r} of shape {spec.shape} does not fit node {node}")


def _check_rows(
    frame_header: TraceFrameHeader, nodes: StructuredArray, versions: StructuredArray
) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens and of sampled tokens of each node.

    Raises DataCorrupt if a row of the node table or the version table is invalid. A loop takes under a millisecond
    more than numpy for 500 turns, and less for the few rows of most traces.
    """
    lengths = frame_header.lengths
    token_stop = logprob_stop = record_stop = 0
    num_tokens: list[int] = []
    num_sampled: list[int] = []
    for node, row in enumerate(nodes.tolist()):
        parent, stop, next_logprob_stop, next_record_stop, sampled_start, sampled_stop, start, end, trainable = row
        size, sampled_size = stop - token_stop, next_logprob_stop - logprob_stop
        if not (
            -1 <= parent < node
            and 0 <= trainable <= 1
            and size >= 0
            and sampled_size >= 0
            and next_record_stop >= record_stop
            and sampled_start >= 0
            and sampled_stop <= size
            and sampled_stop - sampled_start == sampled_size
            and 0 <= start <= end <= size
        ):
            raise DataCorrupt(f"node {node} violates the invariants of the message graph")
        token_stop, logprob_stop, record_stop = stop, next_logprob_stop, next_record_stop
        num_tokens.append(size)
        num_sampled.append(sampled_size)
    if (token_stop, logprob_stop, record_stop) != (lengths.tokens, lengths.logprobs, lengths.records):
        raise DataCorrupt(f"the parts of the last node do not end at {lengths}")
    counts: dict[int, int] = {}  # of sampled tokens with a version, by node
    previous_owner = 0
    for owner, policy, _, _, count in versions.tolist():
        if not previous_owner <= owner < lengths.nodes:
            raise DataCorrupt("the rows of a table are not in the order of the nodes")
        if not 0 <= policy < lengths.policies or count < 0:
            raise DataCorrupt("the weight versions do not fit the sampled tokens")
        counts[owner] = counts.get(owner, 0) + count
        previous_owner = owner
    if any(count != num_sampled[owner] for owner, count in counts.items()):
        raise DataCorrupt("the weight versions do not fit the sampled tokens")
    return num_tokens, num_sampled


# -- the envelope --------------------------------------------------------------------------------------------------


def _build_envelope(kind: int, header: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the prefix with the checksum, the header and the aligned parts as one buffer."""
    pieces: list[bytes | memoryview] = [b"", header, bytes(-(_PREFIX.size + len(header)) % ALIGNMENT)]
    for part in parts:
        pieces += [part, bytes(-len(part) % ALIGNMENT)]
    length = _PREFIX.size + sum(len(piece) for piece in pieces)
    prefix = _PREFIX.pack(_MAGIC, TRACE_SCHEMA, kind, length, len(header), 0)
    pieces[0] = prefix
    crc = zlib.crc32(prefix[:_CRC_OFFSET])
    for piece in pieces[1:]:
        crc = zlib.crc32(piece, crc)
    pieces[0] = prefix[:_CRC_OFFSET] + struct.pack("<I", crc)
    return b"".join(pieces)


def _parse_envelope(data: bytes | bytearray | memoryview, expected_kind: int) -> tuple[memoryview, memoryview]:
    """Verify the prefix and the checksum, and return header and body."""
    view = memoryview(data).toreadonly().cast("B")
    if len(view) < _PREFIX.size:
        raise DataCorrupt(f"a trace has at least {_PREFIX.size} bytes, found {len(view)}")
    magic, schema, kind, length, header_length, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise DataCorrupt(f"this is not a trace: it starts with {magic!r}, not {_MAGIC!r}")
    if length != len(view) or _PREFIX.size + header_length > length:
        raise DataCorrupt(f"expected {length} bytes with a header of {header_length}, found {len(view)}")
    if zlib.crc32(view[_PREFIX.size :], zlib.crc32(view[:_CRC_OFFSET])) != crc:
        raise DataCorrupt(f"the checksum of the {length} bytes does not match")
    if schema > TRACE_SCHEMA:
        raise DataCorrupt(f"this trace has schema {schema}; this version of ramify reads up to {TRACE_SCHEMA}")
    if schema < 1:
        raise DataCorrupt(f"schema {schema} does not exist")
    if kind != expected_kind:
        raise DataCorrupt(f"expected a {('frame', 'episode')[expected_kind]}, found kind {kind}")
    header_stop = _PREFIX.size + header_length
    return view[_PREFIX.size : header_stop], view[align_up(header_stop) :]


def split_body(body: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """Return the parts of a body, which are aligned and must fill it exactly."""
    views: list[memoryview] = []
    offset = 0
    for length in lengths:
        views.append(body[offset : offset + length])
        offset += align_up(length)
    if offset != len(body) or any(length < 0 for length in lengths):
        raise DataCorrupt(f"expected columns of {offset} bytes, found {len(body)}")
    return views


def align_up(num_bytes: int) -> int:
    """Return the number of bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
