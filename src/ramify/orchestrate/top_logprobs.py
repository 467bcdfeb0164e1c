"""The likeliest tokens of a teacher, in one file per group beside the run's database.

They are many: k tokens with logprobs for every trained token. So they are not in SQLite, where each of them would be
written twice. A file is complete on disk before the ledger says that its group is scored; the batch of the group refers
to it by the group's number.

    crc32 u32 | msgpack: [trace id, node, k, pairs of token and logprob] for each node
"""

import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np

from ramify.core.errors import DataCorrupt
from ramify.core.files import fsync_path, mkdir_and_fsync, replace_file, write_and_fsync
from ramify.trace.annotation import TOP_DTYPE
from ramify.trace.columns import StructuredArray

TOP_LOGPROBS_DIR = "top_logprobs"  # in the run directory

TopLogprobsByNode = dict[tuple[str, int], StructuredArray]  # by trace id and node: [tokens, k], as TOP_DTYPE
_CRC = struct.Struct("<I")


def write_top_logprobs(run: Path, group_number: int, top_logprobs: TopLogprobsByNode) -> None:
    """Write the likeliest tokens of a group; they are on disk when this returns."""
    path = get_top_logprobs_path(run, group_number)
    mkdir_and_fsync(path.parent)
    rows = [
        (trace_id, node, top.shape[1], top.astype(TOP_DTYPE).tobytes())
        for (trace_id, node), top in top_logprobs.items()
    ]
    data = msgspec.msgpack.encode(rows)
    with replace_file(path) as partial_path:
        write_and_fsync(partial_path, _CRC.pack(zlib.crc32(data)) + data)
    fsync_path(path.parent)


def read_top_logprobs(run: Path, group_number: int) -> TopLogprobsByNode:
    """Return the likeliest tokens of a group. Raises DataCorrupt if the file is missing or damaged."""
    path = get_top_logprobs_path(run, group_number)
    try:
        data = path.read_bytes()
        (crc,) = _CRC.unpack_from(data)
        if zlib.crc32(data[_CRC.size :]) != crc:
            raise ValueError("the checksum does not match")
        rows = msgspec.msgpack.decode(data[_CRC.size :], type=list[tuple[str, int, int, bytes]])
        return {(trace, node): np.frombuffer(top, TOP_DTYPE).reshape(-1, top_k) for trace, node, top_k, top in rows}
    except (OSError, struct.error, msgspec.MsgspecError, ValueError) as error:
        raise DataCorrupt(f"{path}: the teacher's likeliest tokens cannot be read: {error}") from error


def remove_top_logprobs(run: Path, group_number: int) -> None:
    """Remove the file of a group, if it has one."""
    get_top_logprobs_path(run, group_number).unlink(missing_ok=True)


def get_top_logprobs_path(run: Path, group_number: int) -> Path:
    """Return the file of a group, which need not exist."""
    return run / TOP_LOGPROBS_DIR / f"{group_number}.bin"
