"""Days of the Gregorian calendar."""

MONTH_LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap_year(year: int) -> bool:
    """Return whether a year has a 29th of February: every fourth year, but of the full centuries only every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year: int, month: int) -> int:
    """Return the number of days of a month, 1 to 12."""
    if month == 2 and is_leap_year(year):
        return 29
    return MONTH_LENGTHS[month - 1]


def day_of_year(year: int, month: int, day: int) -> int:
    """Return the number of a day in its year: 1 for the first of January."""
    return sum(days_in_month(year, earlier) for earlier in range(1, month)) + day


def next_day(year: int, month: int, day: int) -> list[int]:
    """Return the year, month and day of the following day."""
    if day < days_in_month(year, month):
        return [year, month, day + 1]
    if month < 12:
        return [year, month + 1, 1]
    return [year + 1, 1, 1]


def count_leap_years(first: int, last: int) -> int:
    """Return how many years from `first` to `last`, both included, are leap years."""
    return sum(1 for year in range(first, last + 1) if is_leap_year(year))
