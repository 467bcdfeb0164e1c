"""Positions of tokens for models with three position axes (frame, row, column), such as Qwen3-VL.

Text tokens count up on all three axes together. The tokens of an image share one start position and count frames,
rows and columns separately; the text after it continues behind the largest of these:

    tokens      a  b  i  i  i  i  i  i  c  d        an image of 2 rows and 3 columns
    frame       0  1  2  2  2  2  2  2  5  6
    row         0  1  2  2  2  3  3  3  5  6
    column      0  1  2  3  4  2  3  4  5  6

So an image of n tokens takes only max(frames, rows, columns) positions, and every token after it is moved back by the
difference. In a forest "after it" is its subtree. Engine and trainer both use these functions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class ImageSpan(NamedTuple):
    """The tokens [start, stop) of an image, and its frames, rows and columns of tokens."""

    start: int
    stop: int
    grid: tuple[int, int, int]

    @property
    def num_skipped(self) -> int:
        """How many positions fewer than tokens the image takes."""
        return self.stop - self.start - max(self.grid)


def compute_positions(
    depths: npt.ArrayLike, images: Sequence[ImageSpan], subtree_end: npt.NDArray[np.integer] | None = None
) -> Int64Array:
    """Return the positions [3, n] of n tokens.

    `depths` are the numbers of tokens before each token on its path: `arange(n)` for a sequence, the `position_ids` of
    a forest or pack, whose `subtree_end` must then be given too.
    """
    token_depths = np.asarray(depths, np.int64)
    num_tokens = len(token_depths)
    skipped = np.zeros(num_tokens + 1, np.int64)  # differences; their running sum is the number of skipped positions
    for image in images:
        end = num_tokens if subtree_end is None else int(subtree_end[image.stop - 1])
        skipped[image.stop] += image.num_skipped
        skipped[end] -= image.num_skipped
    positions = np.tile(token_depths - np.cumsum(skipped[:-1]), (3, 1))
    for image in images:
        start = positions[0, image.start]
        positions[:, image.start : image.stop] = start + np.indices(image.grid).reshape(3, -1)
    return positions
