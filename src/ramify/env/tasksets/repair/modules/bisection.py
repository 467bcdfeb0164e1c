"""Binary search in sorted lists."""


def lower_bound(numbers: list[int], value: int) -> int:
    """Return the index of the first number that is at least `value`; the length of the list if there is none."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def count_between(numbers: list[int], smallest: int, largest: int) -> int:
    """Return how many numbers of a sorted list are between `smallest` and `largest`, both included."""
    if smallest > largest:
        return 0
    return lower_bound(numbers, largest + 1) - lower_bound(numbers, smallest)


def nearest(numbers: list[int], value: int) -> int:
    """Return the number of a sorted, non-empty list that is nearest to `value`; the smaller one of two equally near."""
    index = lower_bound(numbers, value)
    if index == len(numbers):
        return numbers[-1]
    if index > 0 and value - numbers[index - 1] <= numbers[index] - value:
        return numbers[index - 1]
    return numbers[index]


def integer_root(number: int) -> int:
    """Return the largest whole number whose square is at most `number`, which is not negative."""
    low, high = 0, number + 1
    while high - low > 1:
        middle = (low + high) // 2
        if middle * middle <= number:
            low = middle
        else:
            high = middle
    return low
