"""Durations as text."""

from ramify.core.names import format_duration


def test_format_duration():
    assert [format_duration(s) for s in (0.4, 59, 60, 125, 3725)] == ["0s", "59s", "1m00s", "2m05s", "1h02m"]
