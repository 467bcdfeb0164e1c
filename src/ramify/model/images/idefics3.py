"""Images of Idefics3 and SmolVLM: square tiles and a small copy of the image, each with the same number of tokens."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ramify.core.errors import ConfigInvalid
from ramify.model.images.decode import PixelScaling, RgbArray, decode_image, read_size, resize
from ramify.model.images.processed_image import ImageLayout, ProcessedImage
from ramify.trace import Media

DEFAULT_MEAN = DEFAULT_STD = (0.5, 0.5, 0.5)
DEFAULT_TILE_SIZE = 364
DEFAULT_LONGEST_EDGE = 4 * DEFAULT_TILE_SIZE
MAX_EDGE = 4096
LANCZOS = 1


class Idefics3Family:
    """The image family of an Idefics3 or SmolVLM model, from its config and its processor configs.

    `image_processor` is `preprocessor_config.json`, `processor` is `processor_config.json`.
    """

    name = "idefics3"
    marker = "<image>"

    def __init__(
        self, config: Mapping[str, Any], image_processor: Mapping[str, Any], processor: Mapping[str, Any]
    ) -> None:
        self.image_token_id = int(config["image_token_id"])
        self._scaling = PixelScaling.from_config(image_processor, DEFAULT_MEAN, DEFAULT_STD)
        self._resizes = bool(image_processor.get("do_resize", True))
        self._splits = bool(image_processor.get("do_image_splitting", True))
        self._resample = int(image_processor.get("resample", LANCZOS))
        self._longest_edge = read_size(image_processor, "size", "longest_edge", DEFAULT_LONGEST_EDGE)
        self._tile_size = read_size(image_processor, "max_image_size", "longest_edge", DEFAULT_TILE_SIZE)
        self._tokens_per_tile = _count_tile_tokens(config, self._tile_size)
        configured_tokens = processor.get("image_seq_len")
        if configured_tokens is not None and int(configured_tokens) != self._tokens_per_tile:
            raise ConfigInvalid(
                f"model: processor_config.json has image_seq_len = {configured_tokens}, but a tile of "
                f"{self._tile_size} pixels gives {self._tokens_per_tile} tokens; correct one of them"
            )

    def process(self, media: Media) -> ProcessedImage:
        """Return the tiles of an image, row by row, with the whole image last. Raises ImageInvalid."""
        tiles, rows, columns = self._cut_tiles(decode_image(media.data))
        values = np.stack([self._scaling.apply(tile) for tile in tiles])
        grid = (1, rows, columns) if rows else (1, 1, 1)
        return ProcessedImage(media.hash, self.name, {"pixel_values": values}, grid, len(tiles) * self._tokens_per_tile)

    def placeholder_text(self, layout: ImageLayout) -> str:
        """Return the image tokens of all tiles, with the tokens and line breaks that separate them."""
        tokens = self.marker * self._tokens_per_tile
        whole_image = f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
        if layout.num_tokens == self._tokens_per_tile:
            return whole_image
        _, rows, columns = layout.grid
        tiles = (
            "".join(f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns))
            for row in range(rows)
        )
        return "".join(f"{row}\n" for row in tiles) + "\n" + whole_image

    def _cut_tiles(self, pixels: RgbArray) -> tuple[list[RgbArray], int, int]:
        """Return the tiles, and their number of rows and columns: 0 if the image is a single tile."""
        tile = self._tile_size
        if self._resizes:
            pixels = resize(pixels, *self._find_size(*pixels.shape[:2]), self._resample)
        if not self._splits:
            return [resize(pixels, tile, tile, self._resample)], 0, 0
        pixels = resize(pixels, *self._find_tiled_size(*pixels.shape[:2]), self._resample)
        rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
        if rows == columns == 1:
            return [pixels], 0, 0
        tiles = [
            pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            for row in range(rows)
            for column in range(columns)
        ]
        return [*tiles, resize(pixels, tile, tile, self._resample)], rows, columns

    def _find_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size with the configured longest edge, and at most `MAX_EDGE`; the shorter edge is made even."""
        ratio = width / height
        longest = self._longest_edge
        if width >= height:
            height, width = _make_even(int(longest / ratio)), longest
        else:
            height, width = longest, _make_even(int(longest * ratio))
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MAX_EDGE:
            height, width = int(MAX_EDGE / ratio), MAX_EDGE
        elif height > width and height > MAX_EDGE:
            height, width = MAX_EDGE, int(MAX_EDGE * ratio)
        return max(height, 1), max(width, 1)

    def _find_tiled_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size whose edges are multiples of a tile's."""
        ratio = width / height
        if width >= height:
            width = self._round_up(width)
            return self._round_up(int(width / ratio)), width
        height = self._round_up(height)
        return height, self._round_up(int(height * ratio))

    def _round_up(self, length: int) -> int:
        return math.ceil(length / self._tile_size) * self._tile_size


def _make_even(length: int) -> int:
    return length + length % 2


def _count_tile_tokens(config: Mapping[str, Any], tile_size: int) -> int:
    patch_size = int(config.get("vision_config", {}).get("patch_size", 32))
    return (tile_size // patch_size) ** 2 // int(config.get("scale_factor", 2)) ** 2
