"""The order of examples: each once per epoch, shuffled by the seed.

The order of epoch e depends only on the seed and e. So a run resumes from its position alone, whatever happened to the
process, the number of ranks or the batch size in between.
"""

from functools import lru_cache

import numpy as np


class ExampleOrder:
    """The indices 0 .. num_examples - 1 in shuffled order, epoch after epoch."""

    def __init__(self, num_examples: int, epochs: int, seed: int) -> None:
        self.num_examples, self.epochs, self.seed = num_examples, epochs, seed
        self._get_epoch_order = lru_cache(maxsize=2)(self._shuffle_epoch)

    def __len__(self) -> int:
        return self.num_examples * self.epochs

    def indices_at(self, position: int, batch_size: int) -> list[int]:
        """Return the examples at positions [position, position + batch_size); fewer at the end."""
        stop = min(position + batch_size, len(self))
        positions = (divmod(i, self.num_examples) for i in range(position, stop))
        return [int(self._get_epoch_order(epoch)[index]) for epoch, index in positions]

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)


def split_held_out(num_examples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split the examples into those to train on and those held out; the same seed gives the same split."""
    order = np.random.default_rng([seed, num_examples]).permutation(num_examples)
    num_held_out = round(num_examples * fraction) if fraction else 0
    return sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())
