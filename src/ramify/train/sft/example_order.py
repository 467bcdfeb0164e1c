"""The order of examples: each once an epoch, shuffled by the seed, and the place in it a single number.

The order of epoch e depends on the seed and e alone. So a run is continued from its position, whatever happened to the
process, the number of ranks or the batch size in between.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np


class ExampleOrder:
    """The examples 0 .. count-1, epoch after epoch."""

    def __init__(self, num_examples: int, epochs: int, seed: int) -> None:
        self.num_examples, self.epochs, self.seed = num_examples, epochs, seed
        self._get_epoch_order = lru_cache(maxsize=2)(self._shuffle_epoch)

    def __len__(self) -> int:
        return self.num_examples * self.epochs

    def indices_at(self, position: int, batch_size: int) -> list[int]:
        """The examples at positions [position, position + size); fewer at the end."""
        stop = min(position + batch_size, len(self))
        return [
            int(self._get_epoch_order(at // self.num_examples)[at % self.num_examples]) for at in range(position, stop)
        ]

    def count_remaining_steps(self, position: int, batch_size: int) -> int:
        """How many steps of `size` examples are left."""
        return -(-max(0, len(self) - position) // batch_size)

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)


def split_held_out(num_examples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """The examples to train on, and those to measure: the same split whenever the seed is the same."""
    order = np.random.default_rng([seed, num_examples]).permutation(num_examples)
    apart = round(num_examples * fraction) if fraction else 0
    return sorted(order[apart:].tolist()), sorted(order[:apart].tolist())


def iter_chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Items in pieces of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))
