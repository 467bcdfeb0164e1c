"""The inputs of a model for one image, and their binary form."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import RequestInvalid


class ImageLayout(NamedTuple):
    """What a prompt needs to know of an image: frames, rows and columns of its tokens, and their number."""

    grid: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image as a model takes it.

    - `hash`: the SHA-256 of the original bytes.
    - `family`: the name of the `ImageFamily` that processed it.
    - `arrays`: what the transformers model takes, by the names of its arguments; without a batch axis.
    - `grid`: frames, rows and columns of the tokens that get an embedding.
    - `num_tokens`: the number of these tokens.

    Example, an image of 100 × 100 pixels for a Qwen3-VL with patches of 16 pixels that are merged 2 × 2:

        arrays = {"pixel_values": float32[36, 1536], "image_grid_thw": int64[1, 3] = [[1, 6, 6]]}
        grid = (1, 3, 3)      num_tokens = 9
    """

    hash: str
    family: str
    arrays: dict[str, npt.NDArray[Any]]
    grid: tuple[int, int, int]
    num_tokens: int

    @property
    def layout(self) -> ImageLayout:
        """The layout of the tokens."""
        return ImageLayout(self.grid, self.num_tokens)

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def encode(self) -> bytes:
        """Return the msgpack form."""
        arrays = {
            name: _EncodedArray(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())
            for name, array in self.arrays.items()
        }
        return msgspec.msgpack.encode(_EncodedImage(self.hash, self.family, arrays, self.grid, self.num_tokens))

    @classmethod
    def decode(cls, data: bytes) -> "ProcessedImage":
        """Return the image of a msgpack form; its arrays are read-only views of `data`. Raises RequestInvalid."""
        try:
            image = msgspec.msgpack.decode(data, type=_EncodedImage)
            arrays = {name: _decode_array(array) for name, array in image.arrays.items()}
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise RequestInvalid(f"image: expected a processed image in msgpack: {error}") from error
        return cls(image.hash, image.family, arrays, image.grid, image.num_tokens)


class _EncodedArray(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _EncodedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: str
    family: str
    arrays: dict[str, _EncodedArray]
    grid: tuple[int, int, int]
    num_tokens: int


def _decode_array(array: _EncodedArray) -> npt.NDArray[Any]:
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "fiub":
        raise ValueError(f"arrays of dtype {dtype} are not allowed")
    return np.frombuffer(array.data, dtype).reshape(array.shape)
