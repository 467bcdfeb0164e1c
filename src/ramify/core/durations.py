"""Durations as text."""


def format_duration(seconds: float) -> str:
    """Return a duration in the form `42s`, `3m05s` or `1h02m`."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, remainder = divmod(total, 60)
    return f"{minutes}m{remainder:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
