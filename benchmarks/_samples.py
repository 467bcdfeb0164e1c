"""The samples every trainer of a comparison trains on: seeded, standard library only, the same in every interpreter."""

from __future__ import annotations

import random
from dataclasses import dataclass

LOGPROB = -3.0  # what the sampler is said to have given every token


@dataclass(frozen=True, slots=True)
class Example:
    """One attempt at a prompt of its own."""

    prompt: list[int]
    reply: list[int]
    advantage: float


def examples(
    count: int, prompt: tuple[int, int], reply: tuple[int, int], vocabulary: int, seed: int = 0
) -> list[Example]:
    """Attempts whose prompts and replies have lengths within these bounds."""
    rng = random.Random(seed)

    def ids(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(*bounds))]

    return [Example(ids(prompt), ids(reply), rng.choice([-1.0, 1.0])) for _ in range(count)]


def micro_batches(made: list[Example], size: int) -> list[list[Example]]:
    """As a padded loop takes them: `size` at a time, in the order they came."""
    return [made[at : at + size] for at in range(0, len(made), size)]
