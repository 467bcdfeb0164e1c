"""What a module does not load when it is imported, because it takes long or belongs to another use."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_unused_modules_are_not_loaded():
    unused = {
        "import ramify.rollout.evals.plan": {"rich", "uvicorn", "torch"},
        "import ramify; ramify.rl; ramify.sft": {"rich", "torch"},
        "import ramify.cli.eval": {"ramify.view.queries", "torch"},
    }
    script = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in unused)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for names, (statement, modules) in zip(result.stdout.splitlines(), unused.items(), strict=True):
        loaded = set(names.split())
        assert "ramify" in loaded
        assert not modules & loaded, statement
