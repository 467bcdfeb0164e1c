"""The same checks as test functions, for `verify = "pytest"`."""

from pathlib import Path

import pytest


def test_file_exists() -> None:
    assert Path("counts.txt").is_file()


@pytest.mark.parametrize("number", [0, 1])
def test_counts(number: int) -> None:
    expected = Path("/tests/expected.txt").read_text().splitlines()
    assert Path("counts.txt").read_text().splitlines()[number] == expected[number]
