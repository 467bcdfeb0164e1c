"""Format and size of an image, read from its first bytes without decoding it.

The size is known before any pixel is decoded, so that an image which would fill the memory is refused for the price of
a few bytes. It needs no Pillow, so that every installation can describe an image.
"""

import re
import struct
from dataclasses import dataclass

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # frame headers; the three are other tables
JPEG_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
JPEG_FILL = re.compile(rb"\xff+")
MAX_JPEG_MARKERS = 1000  # read before the size; a JPEG of an attacker may have millions
MIME_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
"""The mime types of the formats that are accepted."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The format (`png`, `jpeg` or `webp`) and the size of an image in pixels."""

    format: str
    width: int
    height: int


def read_image_header(data: bytes) -> ImageHeader | None:
    """Return the header of a PNG, JPEG or WebP; None for other data, also if the header is cut off."""
    try:
        if data.startswith(PNG_SIGNATURE):
            return ImageHeader("png", *struct.unpack_from(">II", data, 16))
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg_header(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _read_webp_header(data)
    except (struct.error, IndexError):
        return None
    return None


def detect_format(data: bytes) -> str:
    """Return the name of the format of any data, for messages."""
    if header := read_image_header(data):
        return header.format
    start = data[:512].lstrip().lower()
    if b"<svg" in start:
        return "svg"
    names = {b"gif8": "gif", b"bm": "bmp", b"ii*\0": "tiff", b"mm\0*": "tiff", b"%pdf": "pdf"}
    return next((name for signature, name in names.items() if start.startswith(signature)), "unknown")


def describe_image(data: bytes, hash: str) -> str:
    """Return a short description for people, such as `[image 100×100 png 3f2a]`."""
    header = read_image_header(data)
    facts = f"{header.width}×{header.height} {header.format} " if header else ""
    return f"[image {facts}{hash[:4]}]"


def _read_jpeg_header(data: bytes) -> ImageHeader | None:
    position = 2
    for _ in range(MAX_JPEG_MARKERS):
        fill = JPEG_FILL.match(data, position)  # a marker may have any number of bytes 255 before its own
        if fill is None:
            return None
        position = fill.end()
        marker = data[position]
        if marker in JPEG_SIZE_MARKERS:
            height, width = struct.unpack_from(">HH", data, position + 4)
            return ImageHeader("jpeg", width, height)
        length = 0 if marker in JPEG_BARE_MARKERS else int.from_bytes(data[position + 1 : position + 3], "big")
        position += 1 + length
    return None


def _read_webp_header(data: bytes) -> ImageHeader | None:
    chunk = data[12:16]
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF)
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("webp", (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1)
    if chunk == b"VP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[start : start + 3], "little") + 1 for start in (24, 27))
        return ImageHeader("webp", width, height)
    return None
