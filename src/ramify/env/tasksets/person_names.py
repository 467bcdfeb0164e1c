"""The bundled first and last names of people."""

from functools import cache
from pathlib import Path

NAMES_FILE = Path(__file__).with_name("names.txt")


@cache
def load_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the bundled first names and last names."""
    first, last = (tuple(line.partition(":")[2].split()) for line in NAMES_FILE.read_text("utf-8").splitlines())
    return first, last
