"""Times of a day, written as "HH:MM" from "00:00" to "23:59"."""

MINUTES_PER_DAY = 24 * 60


def to_minutes(time: str) -> int:
    """Return the minutes since midnight: "01:30" -> 90."""
    hours, minutes = time.split(":")
    return int(hours) * 60 + int(minutes)


def add_minutes(time: str, minutes: int) -> str:
    """Return the time that is `minutes` later (earlier if negative), on whatever day: ("23:50", 20) -> "00:10"."""
    total = (to_minutes(time) + minutes) % MINUTES_PER_DAY
    return f"{total // 60:02d}:{total % 60:02d}"


def duration(start: str, end: str) -> int:
    """Return the minutes from `start` to `end`, which is on the next day if it is earlier than `start`."""
    minutes = to_minutes(end) - to_minutes(start)
    return minutes + MINUTES_PER_DAY if minutes < 0 else minutes


def to_twelve_hours(time: str) -> str:
    """Return the time with am or pm: "00:05" -> "12:05 am", "13:00" -> "1:00 pm"."""
    minutes = to_minutes(time)
    hour = minutes // 60
    suffix = "am" if hour < 12 else "pm"
    return f"{(hour - 1) % 12 + 1}:{minutes % 60:02d} {suffix}"
