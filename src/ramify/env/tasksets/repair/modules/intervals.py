"""Closed intervals of whole numbers, written as [first, last]."""


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """Return the union of the intervals, sorted, as few intervals as possible.

    Intervals that overlap or touch (the next one begins at last + 1) become one: [[5, 6], [1, 4]] -> [[1, 6]].
    """
    merged: list[list[int]] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def count_numbers(intervals: list[list[int]]) -> int:
    """Return how many whole numbers are in at least one interval."""
    return sum(last - first + 1 for first, last in merge_intervals(intervals))


def find_gaps(intervals: list[list[int]]) -> list[list[int]]:
    """Return the intervals that lie between the given ones, in order: [[1, 2], [5, 6]] -> [[3, 4]]."""
    merged = merge_intervals(intervals)
    gaps: list[list[int]] = []
    for index in range(1, len(merged)):
        gaps.append([merged[index - 1][1] + 1, merged[index][0] - 1])
    return gaps
