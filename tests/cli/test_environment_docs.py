"""The example of docs/write-an-environment.md works as documented."""

import json
import re
from pathlib import Path

import pytest

from ramify.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"


@pytest.mark.process
@pytest.mark.full("starts an engine twice")
def test_documented_environment_validates_and_evaluates(tmp_path, monkeypatch):
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    assert sum(bool(line.strip()) for line in found[1].splitlines()) <= 40
    (tmp_path / "my_env.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "my_env.py"]) == 0
    assert main(["eval", "my_env.py", "-m", "tiny", "-n", "8", "-r", "2", "--name", "run"]) == 0
    assert main(["export", "outputs/run", "--to", "jsonl", "-o", "rows.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 16 and 0 < sum(rewards) / len(rewards) < 1
