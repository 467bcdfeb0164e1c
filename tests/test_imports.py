"""What a module does not load when it is imported, because it takes long or belongs to another use."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("statement", "unused"),
    [
        ("import ramify; ramify.rl; ramify.sft", {"rich", "torch"}),
        ("import ramify.rollout.evals.plan", {"rich", "uvicorn", "torch"}),
        ("import ramify.cli.eval", {"ramify.view.queries", "torch"}),
    ],
)
def test_unused_modules_are_not_loaded(statement, unused):
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(result.stdout.split())
    assert "ramify" in loaded
    assert not unused & loaded
