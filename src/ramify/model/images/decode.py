"""Image bytes to pixels, with limits that hold before anything is decoded.

Whoever sends an image may be a boxed agent. Only three formats are accepted, an image has one frame, and its number of
pixels is read from the header, so that a small file cannot become a large array.
"""

import struct
import zlib
from io import BytesIO

import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid, ImageInvalid
from ramify.trace.image_header import MIME_TYPES, detect_format, read_image_header

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 25_000_000
ADDRESS_SCHEMES = (b"http:", b"https:", b"file:", b"ftp:", b"/")

RgbArray = npt.NDArray[np.uint8]
"""Pixels as [height, width, 3]."""


def check_image_size(num_bytes: int) -> None:
    """Raise ImageInvalid if an image has too many bytes."""
    if num_bytes > MAX_BYTES:
        raise ImageInvalid(f"image: {num_bytes} bytes are more than the limit of {MAX_BYTES}; send a smaller image")


def check_image(data: bytes) -> None:
    """Raise ImageInvalid if the data is too large or no PNG, JPEG or WebP. Nothing is decoded."""
    check_image_size(len(data))
    if data.startswith(ADDRESS_SCHEMES):
        raise ImageInvalid(
            f"image: expected a data URL, found {data.decode(errors='replace')[:80]!r}; addresses are not fetched"
        )
    header = read_image_header(data)
    if header is None:
        raise ImageInvalid(
            f"image: expected a complete {', '.join(MIME_TYPES)} image, found {len(data)} bytes of format "
            f"{detect_format(data)!r}; convert it to PNG"
        )
    if header.width * header.height > MAX_PIXELS:
        raise ImageInvalid(
            f"image: {header.width} × {header.height} pixels are more than the limit of {MAX_PIXELS}; scale it down"
        )
    if not header.width or not header.height:
        raise ImageInvalid(f"image: {header.width} × {header.height} pixels; expected at least one in each direction")


def decode_image(data: bytes) -> RgbArray:
    """Return the pixels of an image, turned upright as its EXIF orientation says. Raises ImageInvalid."""
    check_image(data)
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigInvalid("images need Pillow; install ramify with the extra `vision`") from error
    try:
        with Image.open(BytesIO(data), formats=tuple(name.upper() for name in MIME_TYPES)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageInvalid(f"image: its header claims fewer pixels than its {image.width} × {image.height}")
            num_frames = getattr(image, "n_frames", 1)
            if num_frames > 1:
                raise ImageInvalid(f"image: an animation of {num_frames} frames; send one of them as a still image")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # without a copy, like the next line: an image may be large
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError, zlib.error, struct.error) as error:
        raise ImageInvalid(f"image: damaged or incomplete {detect_format(data)} data: {error}") from error
    except Image.DecompressionBombError as error:
        raise ImageInvalid(f"image: {error}") from error
