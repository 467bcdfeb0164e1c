"""The example of docs/write-an-environment.md works as documented."""

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"


def test_documented_environment_validates_and_evaluates(tmp_path):
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    assert sum(bool(line.strip()) for line in found[1].splitlines()) <= 40
    (tmp_path / "my_env.py").write_text(found[1])

    def ramify(*args: str) -> str:
        command = [sys.executable, "-m", "ramify", *args]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    ramify("validate", "my_env.py")
    ramify("eval", "my_env.py", "-m", "tiny", "-n", "8", "-r", "2", "--name", "run")
    ramify("export", "outputs/run", "--to", "jsonl", "-o", "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 16 and 0 < sum(rewards) / len(rewards) < 1
