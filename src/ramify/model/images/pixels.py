"""The steps that image processors have in common: resize, scale and normalize.

They compute the same numbers as the Pillow processors of transformers: resize in uint8, scale in float64, round to
float32, normalize in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.model.images.decode import RgbArray

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PixelScaling:
    """How pixel values become model inputs; None leaves a step out."""

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
