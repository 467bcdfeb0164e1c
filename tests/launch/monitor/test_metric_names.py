"""The table of metric names equals the one in the docs, and covers what the commands read."""

from pathlib import Path

from ramify.launch.monitor import METRIC_DESCRIPTIONS

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_docs_repeat_the_table():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {name.strip("| `"): text.removesuffix(" |").replace("\\|", "|") for name, text in rows}
    assert documented == {name: text for section in METRIC_DESCRIPTIONS.values() for name, text in section.items()}


def test_the_metrics_that_commands_read_are_described():
    names = {name for section in METRIC_DESCRIPTIONS.values() for name in section}
    assert {"reward/all/mean", "reward/<source>/mean", "eval/<source>/avg", "forest/token_ratio"} <= names
