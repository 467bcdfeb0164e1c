"""The CRC-32 of a file, computed by several threads: one thread would take longer than to write the file.

The parts of a file have CRCs of their own, which are combined: the CRC of a text followed by n bytes is a linear map of
the text's CRC that depends on n only, a matrix over GF(2) with a row for each bit.
"""

import zlib
from functools import lru_cache, partial
from pathlib import Path

from ramify.core.async_calls import map_in_daemon_threads

PART_BYTES = 64 << 20
READ_BYTES = 1 << 20  # small enough to be in the CPU cache when they are summed
MAX_THREADS = 8
POLYNOMIAL = 0xEDB88320


def compute_crc32(path: Path) -> int:
    """Return the CRC-32 of a file. Raises OSError."""
    size = path.stat().st_size
    starts = range(0, size, PART_BYTES)
    if len(starts) < 2:
        return _compute_part(path, 0)
    parts = map_in_daemon_threads(partial(_compute_part, path), starts, max_threads=MAX_THREADS)
    crc = parts[0]
    for start, part in zip(starts[1:], parts[1:]):
        crc = _append_bytes(crc, min(PART_BYTES, size - start)) ^ part
    return crc


def _compute_part(path: Path, start: int) -> int:
    crc, remaining, buffer = 0, PART_BYTES, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while remaining and (size := file.readinto(buffer[:remaining])):
            crc = zlib.crc32(buffer[:size], crc)
            remaining -= size
    return crc


def _append_bytes(crc: int, count: int) -> int:
    """Return what the CRC of a text contributes to that of the text and `count` more bytes."""
    return _apply(_power_of_byte(count), crc)


@lru_cache(maxsize=16)
def _power_of_byte(count: int) -> tuple[int, ...]:
    """Return the matrix of `count` zero bytes."""
    result = tuple(1 << bit for bit in range(32))  # the identity
    square = tuple(_shift_byte(1 << bit) for bit in range(32))
    while count:
        if count & 1:
            result = _multiply(square, result)
        square, count = _multiply(square, square), count >> 1
    return result


def _shift_byte(value: int) -> int:
    """Return the state after one zero byte."""
    for _ in range(8):
        value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value


def _multiply(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(left, row) for row in right)


def _apply(matrix: tuple[int, ...], value: int) -> int:
    result = 0
    for bit in range(32):
        if value >> bit & 1:
            result ^= matrix[bit]
    return result
