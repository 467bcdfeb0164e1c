"""What a set of scored rollouts says about a model, and how sure one can be of it.

Repetitions of one task are not independent, so intervals are clustered by task: a thousand samples of ten tasks are ten
observations with less noise, not a thousand. With n samples of a task of which c pass, and C the binomial coefficient,
the unbiased estimates are

    pass@k = 1 - C(n - c, k) / C(n, k)      at least one of k passes
    pass^k = C(c, k) / C(n, k)              all of k pass

A task with fewer than k samples says nothing about k, and is left out of it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z95 = 1.959964  # the normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks. `error` is its standard error; None with a single task, from which no spread can be seen."""

    mean: float
    error: float | None
    tasks: int

    def interval(self, low: float = -math.inf, high: float = math.inf) -> tuple[float, float] | None:
        """The 95 % interval, within what is possible at all."""
        if self.error is None:
            return None
        return max(low, self.mean - Z95 * self.error), min(high, self.mean + Z95 * self.error)


def pass_at(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples passes, from n samples of which c did."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_all(n: int, c: int, k: int) -> float:
    """The chance that all of k samples pass."""
    return math.comb(c, k) / math.comb(n, k)


def clustered_mean(groups: Iterable[Sequence[float]]) -> Estimate | None:
    """The mean of all values, with an error that treats each group as one observation."""
    filled = [group for group in groups if group]
    count = sum(map(len, filled))
    if not count:
        return None
    mean = math.fsum(value for group in filled for value in group) / count
    clusters = len(filled)
    if clusters < 2:
        return Estimate(mean, None, clusters)
    spread = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in filled)
    return Estimate(mean, math.sqrt(spread * clusters / (clusters - 1)) / count, clusters)


def passes(groups: Iterable[Sequence[float]], k: int, threshold: float) -> tuple[Estimate, Estimate] | None:
    """(pass@k, pass^k) over the tasks whose groups have k samples; None if none has."""
    counts = [(len(group), sum(value >= threshold for value in group)) for group in groups if len(group) >= k]
    if not counts:
        return None
    at = clustered_mean([pass_at(n, c, k)] for n, c in counts)
    every = clustered_mean([pass_all(n, c, k)] for n, c in counts)
    assert at is not None and every is not None  # there are counts
    return at, every


def ladder(most: int) -> list[int]:
    """The values of k that are worth showing: powers of two, and the most there is."""
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)}) if most else []
