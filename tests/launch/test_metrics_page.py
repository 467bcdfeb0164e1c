"""The page of metrics covers what the commands read."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_metrics_that_commands_read_are_described():
    names = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert {"reward/all/mean", "reward/<source>/mean", "eval/<source>/avg", "forest/token_ratio"} <= names
