"""The table of metric names is the one of the docs, and covers what is recorded."""

from pathlib import Path

from ramify.monitor import METRIC_DESCRIPTIONS

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_page_repeats_the_table():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {name.strip("| `"): meaning.removesuffix(" |").replace("\\|", "|") for name, meaning in rows}
    assert shown == {name: meaning for section in METRIC_DESCRIPTIONS.values() for name, meaning in section.items()}


def test_the_names_that_the_commands_rely_on_are_in_it():
    known = {name for section in METRIC_DESCRIPTIONS.values() for name in section}
    assert {"reward/all/mean", "reward/<source>/mean", "eval/<source>/avg", "forest/token_ratio"} <= known
