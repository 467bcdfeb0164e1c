"""Sums over windows of consecutive numbers."""


def window_sums(numbers: list[int], size: int) -> list[int]:
    """Return the sum of every window of `size` consecutive numbers; [] if there are fewer numbers."""
    if size > len(numbers):
        return []
    total = sum(numbers[:size])
    sums = [total]
    for index in range(size, len(numbers)):
        total += numbers[index] - numbers[index - size]
        sums.append(total)
    return sums


def best_window(numbers: list[int], size: int) -> int:
    """Return the index where the window with the largest sum starts, the first one of equals; -1 if there is none."""
    sums = window_sums(numbers, size)
    best = -1
    for index, total in enumerate(sums):
        if best < 0 or total > sums[best]:
            best = index
    return best


def max_subarray(numbers: list[int]) -> int:
    """Return the largest sum of consecutive numbers; 0, the sum of none, if all are negative."""
    best = current = 0
    for number in numbers:
        current = max(current + number, 0)
        best = max(best, current)
    return best
