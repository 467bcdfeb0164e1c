"""Simple statistics of whole numbers."""


def median(numbers: list[int]) -> float:
    """Return the middle number of a non-empty list, or the mean of the two middle ones."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def most_common(numbers: list[int]) -> list[int]:
    """Return the numbers that occur most often, sorted; [] for an empty list."""
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    most = max(counts.values(), default=0)
    return sorted(number for number, count in counts.items() if count == most)


def count_in_bins(numbers: list[int], width: int) -> list[int]:
    """Return how many numbers are in each bin of `width`, from 0 to the bin of the largest; ignore negative ones."""
    kept = [number for number in numbers if number >= 0]
    if not kept:
        return []
    bins = [0] * (max(kept) // width + 1)
    for number in kept:
        bins[number // width] += 1
    return bins


def moving_ranks(numbers: list[int]) -> list[int]:
    """Return the rank of each number among itself and those before it: 1 for the largest; equal ones share a rank."""
    ranks: list[int] = []
    for index, number in enumerate(numbers):
        ranks.append(1 + sum(1 for earlier in numbers[:index] if earlier > number))
    return ranks
