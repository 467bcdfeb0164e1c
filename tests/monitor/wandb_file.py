"""Read the history that wandb keeps in its offline `.wandb` file.

The file is a log in LevelDB's format: after a header of 7 bytes it consists of blocks of 32 KiB, and a block consists
of fragments `crc32 u32 | length u16 | kind u8 | data`. The joined fragments of a record are one protobuf `Record`.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

HEADER, BLOCK, FRAGMENT = 7, 32768, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_history(directory: Path) -> list[dict]:
    """Return the history rows of all offline runs below `directory`, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict] = []
    for file in sorted(directory.rglob("*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    offset, parts = HEADER, b""
    while offset + FRAGMENT.size <= len(data):
        if BLOCK - offset % BLOCK < FRAGMENT.size:  # too short for a fragment: padding
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = FRAGMENT.unpack_from(data, offset)
        offset += FRAGMENT.size
        parts += data[offset : offset + length]
        offset += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
