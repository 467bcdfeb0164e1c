"""The configuration of docs/agents.md trains an agent that knows only the address of a model."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.run.reader import read_metrics

ROOT = Path(__file__).parent.parent


@pytest.mark.run
@pytest.mark.full("a run; tests/rollout/harness and tests/rl have the parts")
def test_ten_lines_train_an_agent_program_in_a_sandbox(tmp_path):
    page = (ROOT / "docs" / "agents.md").read_text()
    config = re.search(r"```toml\n(# agent.toml.*?)```", page, re.DOTALL)
    assert config is not None
    lines = [line for line in config[1].splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    (tmp_path / "agent.toml").write_text(config[1])
    shutil.copy(ROOT / "examples" / "reverse_text" / "agent.py", tmp_path)
    small = ["--max_steps", "1", "--orchestrator.batch_size", "4", "--orchestrator.group_size", "2"]
    command = [sys.executable, "-m", "ramify", "rl", "@", "agent.toml", "--name", "run", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [point.name for point in read_metrics(tmp_path / "outputs" / "run", "loss/rl")] == ["loss/rl"]
    log = (tmp_path / "outputs" / "run" / "logs" / "env" / "train" / "reverse-text.log").read_text()
    assert log.count("rollout ended") >= 4 and "rollout failed" not in log
