"""Scores of a set of rollouts: means, pass rates and their confidence intervals.

Repetitions of one task are not independent, so intervals are clustered by task: a thousand samples of ten tasks are ten
observations with less noise, not a thousand. An interval of values with a known range stays inside that range: it is
Wilson's score interval with the sample size that explains the clustered standard error, and Student's quantile for the
number of tasks. Its simulated coverage is 94 to 99 % from five tasks on, even if nearly all rollouts pass; there
`mean ± 2 standard errors` covers 14 to 80 % and leaves the range. Without a range it is Student's interval.

With n samples of a task of which c pass, and C the binomial coefficient, the unbiased estimates are

    pass@k = 1 - C(n - c, k) / C(n, k)      at least one of k passes
    pass^k = C(c, k) / C(n, k)              all of k pass

A task with fewer than k samples is not used for that k.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ramify.run.store import RolloutRecord

KNOWN_RANGES = ((0.0, 1.0), (-1.0, 1.0))
TOLERANCE = 1e-6
TOTAL_NAME = ""  # stands for the total reward in rows that do not store its parts

Bounds = tuple[float, float]


def reward_bounds(rows: Iterable[RolloutRecord]) -> Bounds:
    """Return the lowest and the highest possible reward of a rollout; infinite if they are unknown.

    Nearly all rewards lie in 0 to 1 or in -1 to 1, so a reward whose scores all lie in one of these is assumed to have
    that range. It is also unknown if a reward lies outside the range of the weighted sum of its parts.
    """
    scores: dict[tuple[str, str], list[float]] = {}
    compositions: dict[tuple[str, tuple[tuple[str, float], ...]], None] = {}
    rewards: list[float] = []
    for row in rows:
        if row.failure is not None or row.reward is None:
            continue
        rewards.append(row.reward)
        weights, parts = row.summary.get("weights"), row.summary.get("rewards", {})
        if not weights:
            weights, parts = {TOTAL_NAME: 1.0}, {TOTAL_NAME: row.reward}
        compositions[row.source, tuple(weights.items())] = None
        for name in weights:
            scores.setdefault((row.source, name), []).append(parts[name])
    totals = [
        _sum_ranges([(weight, _infer_range(scores[source, name])) for name, weight in weights])
        for source, weights in compositions
    ]
    if not totals:
        return -math.inf, math.inf
    low, high = min(low for low, _ in totals), max(high for _, high in totals)
    if min(rewards) < low - TOLERANCE or max(rewards) > high + TOLERANCE:
        return -math.inf, math.inf
    return low, high


def _infer_range(scores: list[float]) -> Bounds:
    lowest, highest = min(scores), max(scores)
    return next(((low, high) for low, high in KNOWN_RANGES if low <= lowest and highest <= high), (-math.inf, math.inf))


def _sum_ranges(weighted_ranges: list[tuple[float, Bounds]]) -> Bounds:
    """Return the range of the weighted sum; a negative weight swaps the ends of a range."""
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in weighted_ranges if weight]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)


SCALING_THRESHOLD = 1e100  # larger values are scaled before they are squared or summed
MAX_FIXED_SCORE = 1e6  # larger scores are written with an exponent
Z95 = 1.959964  # normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks. `stderr` is its standard error; None for a single task.

    `low` and `high` are the bounds of a single value; infinite if they are unknown.
    """

    mean: float
    stderr: float | None
    num_tasks: int
    low: float = -math.inf
    high: float = math.inf

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean, which lies within the range of the values."""
        if self.stderr is None:
            return None
        quantile = student_quantile(self.num_tasks - 1)
        span = self.high - self.low
        if not math.isfinite(span) or span <= 0.0:
            return max(self.low, self.mean - quantile * self.stderr), min(self.high, self.mean + quantile * self.stderr)
        proportion = min(1.0, max(0.0, (self.mean - self.low) / span))
        lower, upper = _wilson_interval(proportion, self.stderr / span, self.num_tasks, quantile)
        return self.low + span * lower, self.low + span * upper


def student_quantile(degrees_of_freedom: int) -> float:
    """Return Student's quantile of a two-sided 95 % interval: exact for 1 and 2 degrees of freedom, else to 0.1 %."""
    if degrees_of_freedom == 1:
        return math.tan(math.pi * 0.475)
    if degrees_of_freedom == 2:
        return 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2))
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees_of_freedom**power for power, term in enumerate(terms, start=1))


def _wilson_interval(proportion: float, stderr: float, num_tasks: int, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a proportion, for the number of independent samples that has this standard error.

    If the standard error is 0, the sample size is the number of tasks: ten passes of ten do not prove that all pass.
    """
    variance = proportion * (1.0 - proportion)
    sample_size = variance / stderr**2 if stderr > 0.0 and variance > 0.0 else float(num_tasks)
    square = quantile**2
    center = (proportion + square / (2 * sample_size)) / (1 + square / sample_size)
    half_width = (
        quantile / (1 + square / sample_size) * math.sqrt(variance / sample_size + square / (4 * sample_size**2))
    )
    return max(0.0, min(proportion, center - half_width)), min(1.0, max(proportion, center + half_width))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples passes, from n samples of which c passed."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that all of k samples pass, from n samples of which c passed."""
    return math.comb(c, k) / math.comb(n, k)


def clustered_mean(
    groups: Iterable[Sequence[float]], low: float = -math.inf, high: float = math.inf
) -> Estimate | None:
    """Return the mean of all values, with a standard error that treats each group as one observation.

    `low` and `high` are the lowest and the highest possible value. Without any value, return None.
    """
    non_empty = [group for group in groups if group]
    count = sum(map(len, non_empty))
    if not count:
        return None
    largest = max(abs(value) for group in non_empty for value in group)
    scale = largest if largest > SCALING_THRESHOLD else 1.0
    mean = math.fsum(value / scale for group in non_empty for value in group) / count
    clusters = len(non_empty)
    if clusters < 2:
        return Estimate(mean * scale, None, clusters, low, high)
    spread = math.fsum(math.fsum(value / scale - mean for value in group) ** 2 for group in non_empty)
    stderr = math.sqrt(spread * clusters / (clusters - 1)) / count
    return Estimate(mean * scale, stderr * scale, clusters, low, high)


def format_score(value: float) -> str:
    """Return a reward or a metric with three decimals, or with four digits if it is large."""
    return f"{value:.3f}" if abs(value) < MAX_FIXED_SCORE else f"{value:.4g}"


def safe_mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value, also if their sum overflows."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):  # ValueError: infinite values of both signs
        return sum(value / len(values) for value in values)


def mean_by_name(tables: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of each number in the tables, by name; None is not counted."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for table in tables for item in table.items()):
        if value is not None:
            values[name].append(value)
    return {name: safe_mean(numbers) for name, numbers in values.items()}


def estimate_pass_rates(
    groups: Iterable[Sequence[float]], k: int, threshold: float
) -> tuple[Estimate, Estimate] | None:
    """Return (pass@k, pass^k) over the groups with at least k samples; None if there is none."""
    counts = [(len(group), sum(value >= threshold for value in group)) for group in groups if len(group) >= k]
    if not counts:
        return None
    pass_at = clustered_mean(([pass_at_k(n, c, k)] for n, c in counts), 0.0, 1.0)
    pass_hat = clustered_mean(([pass_hat_k(n, c, k)] for n, c in counts), 0.0, 1.0)
    assert pass_at is not None and pass_hat is not None  # there are counts
    return pass_at, pass_hat


def choose_ks(max_k: int) -> list[int]:
    """Return the values of k to report: the powers of two up to `max_k`, and `max_k`."""
    return sorted({min(2**power, max_k) for power in range(max_k.bit_length() + 1)}) if max_k else []
