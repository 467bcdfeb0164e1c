"""Images of Qwen3-VL: one image of any size, cut into patches, with three position axes."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ramify.core.errors import ImageInvalid
from ramify.model.images.decode import Float32Array, PixelScaling, decode_image, read_size, resize
from ramify.model.images.processed_image import ImageLayout, ProcessedImage
from ramify.trace import Media

DEFAULT_MEAN = (0.48145466, 0.4578275, 0.40821073)
DEFAULT_STD = (0.26862954, 0.26130258, 0.27577711)
DEFAULT_MIN_PIXELS = 56 * 56
DEFAULT_MAX_PIXELS = 28 * 28 * 1280
BICUBIC = 3
MAX_ASPECT_RATIO = 200


class Qwen3VLFamily:
    """The image family of a Qwen3-VL model, from its config and its preprocessor config."""

    name = "qwen3_vl"
    marker = "<|image_pad|>"

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.image_token_id = int(config.get("image_token_id", 151655))
        self._scaling = PixelScaling.from_config(processor, DEFAULT_MEAN, DEFAULT_STD)
        self._resizes = bool(processor.get("do_resize", True))
        self._resample = int(processor.get("resample", BICUBIC))
        self._patch_size = int(processor.get("patch_size", 14))
        self._num_frames = int(processor.get("temporal_patch_size", 2))
        self._merge_size = int(processor.get("merge_size", 2))
        self._min_pixels = int(
            processor.get("min_pixels") or read_size(processor, "size", "shortest_edge", DEFAULT_MIN_PIXELS)
        )
        self._max_pixels = int(
            processor.get("max_pixels") or read_size(processor, "size", "longest_edge", DEFAULT_MAX_PIXELS)
        )

    def process(self, media: Media) -> ProcessedImage:
        """Return the patches of an image. Raises ImageInvalid."""
        pixels = decode_image(media.data)
        if self._resizes:
            height, width = self._find_size(*pixels.shape[:2])
            pixels = resize(pixels, height, width, self._resample)
        patches = self._cut_patches(self._scaling.apply(pixels))
        rows, columns = pixels.shape[0] // self._patch_size, pixels.shape[1] // self._patch_size
        grid = (1, rows // self._merge_size, columns // self._merge_size)
        arrays = {"pixel_values": patches, "image_grid_thw": np.array([[1, rows, columns]], np.int64)}
        return ProcessedImage(media.hash, self.name, arrays, grid, math.prod(grid))

    def placeholder_text(self, layout: ImageLayout) -> str:
        """Return one image token per embedding; the template writes the tokens around them."""
        return self.marker * layout.num_tokens

    def _find_size(self, height: int, width: int) -> tuple[int, int]:
        """Return a size of about the same shape whose sides are multiples of a token's and whose area is allowed."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ImageInvalid(
                f"image: {width} × {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
            )
        side = self._patch_size * self._merge_size  # of the square of pixels that becomes one token
        rounded = round(height / side) * side, round(width / side) * side
        if math.prod(rounded) > self._max_pixels:
            shrink = math.sqrt(height * width / self._max_pixels)
            return max(side, _floor(height / shrink, side)), max(side, _floor(width / shrink, side))
        if math.prod(rounded) < self._min_pixels:
            stretch = math.sqrt(self._min_pixels / (height * width))
            return _ceil(height * stretch, side), _ceil(width * stretch, side)
        return rounded

    def _cut_patches(self, values: Float32Array) -> Float32Array:
        """Cut [3, height, width] into rows of patches; the patches that are merged into one token are neighbours."""
        channels, height, width = values.shape
        patch, merge = self._patch_size, self._merge_size
        side = patch * merge
        if height % side or width % side:
            raise ImageInvalid(f"image: without resizing, {width} × {height} pixels must be multiples of {side}")
        blocks = values.reshape(channels, height // side, merge, patch, width // side, merge, patch)
        blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # token row and column, patch row and column, channel, pixels
        frames = np.repeat(blocks[:, :, :, :, :, None], self._num_frames, axis=5)
        return frames.reshape(height // patch * (width // patch), -1)


def _floor(length: float, side: int) -> int:
    return math.floor(length / side) * side


def _ceil(length: float, side: int) -> int:
    return math.ceil(length / side) * side
