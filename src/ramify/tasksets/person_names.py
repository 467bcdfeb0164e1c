"""Names of people, made from the bundled lists of first and last names."""

from functools import cache
from pathlib import Path

NAMES_FILE = Path(__file__).with_name("names.txt")


@cache
def load_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The bundled first and last names."""
    first, last = (tuple(line.partition(":")[2].split()) for line in NAMES_FILE.read_text("utf-8").splitlines())
    return first, last
