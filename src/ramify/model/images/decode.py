"""Image bytes to pixels, with limits that hold before anything is decoded.

Whoever sends an image may be an agent in a sandbox. Only three formats are accepted, an image has one frame, and its
number of pixels is read from the header, so that a small file cannot become a large array.
"""

import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid, ImageInvalid
from ramify.core.watchdog import watch_storage
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


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image. Raises ImageInvalid if the file cannot be read, is too large or is not an image.

    The name may come from a downloaded dataset, so only regular files that begin like an image are returned.
    """
    try:
        with watch_storage(path):
            if not stat.S_ISREG(path.stat().st_mode):
                raise ImageInvalid(f"image: {path} is not a regular file")
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the name contains a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ImageInvalid(f"image: {path} cannot be read: {reason}") from error
    try:
        check_image(data)
    except ImageInvalid as error:
        raise ImageInvalid(f"{error.message} ({path})") from error
    return data


Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PixelScaling:
    """How pixel values become model inputs; None leaves a step out.

    The numbers equal the Pillow processors of transformers: resize in uint8, scale in float64, round to
    float32, normalize in float32.
    """

    factor: float | None
    mean: Sequence[float] | None
    std: Sequence[float] | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> "PixelScaling":
        """Read the keys of a preprocessor config; `mean` and `std` are the defaults of the family."""
        normalizes = config.get("do_normalize", True)
        return cls(
            factor=config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else None,
            mean=config.get("image_mean") or mean if normalizes else None,
            std=config.get("image_std") or std if normalizes else None,
        )

    def apply(self, pixels: RgbArray) -> Float32Array:
        """Return [3, height, width] of [height, width, 3]."""
        tables = self._build_tables()
        return np.stack([table[pixels[:, :, channel]] for channel, table in enumerate(tables)])

    def _build_tables(self) -> Float32Array:
        """Return the result for each of the 256 values of a channel, [3, 256]: cheaper than computing every pixel."""
        values = np.arange(256, dtype=np.float64)
        scaled = (values if self.factor is None else values * self.factor).astype(np.float32)
        tables = np.tile(scaled, (3, 1))
        if self.mean is None or self.std is None:
            return tables
        return (tables - np.array(self.mean, np.float32)[:, None]) / np.array(self.std, np.float32)[:, None]


def resize(pixels: RgbArray, height: int, width: int, resample: int) -> RgbArray:
    """Resize an image; `resample` is a number of Pillow's filters, as preprocessor configs have it."""
    from PIL import Image

    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), resample=Image.Resampling(resample)))


def read_size(config: Mapping[str, Any], key: str, edge: str, default: int) -> int:
    """Return `config[key][edge]` of a preprocessor config, or the default."""
    sizes: Mapping[str, Any] = config.get(key) or {}
    return int(sizes.get(edge) or default)
