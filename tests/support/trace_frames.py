"""Encoded traces taken apart, changed and sealed again with a right checksum.

Written from the format's description alone. A frame that passes the checksum but makes no sense is what a faulty writer
or another version would send; the checksum cannot catch it, so something else has to.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

PREFIX = struct.Struct("<4sHHQII")  # magic, schema, kind, length, head length, crc32
COLUMNS = {"nodes": 36, "tokens": 4, "logprobs": 4, "records": 1, "versions": 20, "media_refs": 20}  # bytes a row
NODE_FIELDS = (
    "parent",
    "stop",
    "logprobs_stop",
    "record_stop",
    "sampled_start",
    "sampled_stop",
    "content_start",
    "content_stop",
    "trainable",
)
VERSION_FIELDS = ("node", "policy", "incarnation", "step", "count")
MEDIA_FIELDS = ("node", "part", "media", "start", "stop")


@dataclass
class Frame:
    head: dict[str, Any]
    columns: dict[str, np.ndarray]
    extras: list[bytes] = field(default_factory=list)
    schema: int = 1
    kind: int = 0

    def row(self, column: str, row: int, name: str, value: int) -> Frame:
        """Set one field of a row of the node, version or media table."""
        fields = {"nodes": NODE_FIELDS, "versions": VERSION_FIELDS, "media_refs": MEDIA_FIELDS}[column]
        self.columns[column].view("<i4").reshape(-1, len(fields))[row, fields.index(name)] = value
        return self

    def sealed(self) -> bytes:
        parts = [column.tobytes() for column in self.columns.values()] + self.extras
        return seal(msgspec.msgpack.encode(self.head), parts, self.schema, self.kind)


def take_apart(data: bytes) -> Frame:
    _, schema, kind, _, head_length, _ = PREFIX.unpack_from(data)
    head = msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + head_length])
    offset = up(PREFIX.size + head_length)
    columns: dict[str, np.ndarray] = {}
    for (name, size), count in zip(COLUMNS.items(), head.get("until", [0] * 8), strict=False):
        length = size * count
        columns[name] = np.frombuffer(data[offset : offset + length], np.uint8).copy()
        offset += up(length)
    extras: list[bytes] = []
    for _, _, dtype, shape in head.get("arrays", []):
        length = np.dtype(dtype).itemsize * int(np.prod(shape))
        extras.append(data[offset : offset + length])
        offset += up(length)
    assert offset == len(data)
    return Frame(head, columns, extras, schema, kind)


def seal(head: bytes, parts: list[bytes], schema: int = 1, kind: int = 0) -> bytes:
    body = head + bytes(up(PREFIX.size + len(head)) - PREFIX.size - len(head))
    body += b"".join(part + bytes(up(len(part)) - len(part)) for part in parts)
    return reseal(PREFIX.pack(b"RMFY", schema, kind, PREFIX.size + len(body), len(head), 0) + body)


def reseal(data: bytes) -> bytes:
    """The same bytes with the checksum they should have."""
    offset = PREFIX.size - 4
    crc = zlib.crc32(data[PREFIX.size :], zlib.crc32(data[:offset]))
    return data[:offset] + struct.pack("<I", crc) + data[PREFIX.size :]


def up(n: int) -> int:
    return (n + 7) // 8 * 8
