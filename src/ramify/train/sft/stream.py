"""The order of examples: each once an epoch, shuffled by the seed, and the place in it a single number.

The order of epoch e depends on the seed and e alone. So a run is continued from its position, whatever happened to the
process, the number of ranks or the batch size in between.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np


class Stream:
    """The examples 0 .. count-1, epoch after epoch."""

    def __init__(self, count: int, epochs: int, seed: int) -> None:
        self.count, self.epochs, self.seed = count, epochs, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return self.count * self.epochs

    def take(self, position: int, size: int) -> list[int]:
        """The examples at positions [position, position + size); fewer at the end."""
        stop = min(position + size, len(self))
        return [int(self._order(at // self.count)[at % self.count]) for at in range(position, stop)]

    def steps_after(self, position: int, size: int) -> int:
        """How many steps of `size` examples are left."""
        return -(-max(0, len(self) - position) // size)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)


def held_out(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The examples to train on, and those to measure: the same split whenever the seed is the same."""
    order = np.random.default_rng([seed, count]).permutation(count)
    apart = round(count * share) if share else 0
    return sorted(order[apart:].tolist()), sorted(order[:apart].tolist())


def chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Items in pieces of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))
