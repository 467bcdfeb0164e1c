"""What a module does not load when it is imported, because it takes long or belongs to another use."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

ORCHESTRATE = "import ramify.orchestrate as room, importlib, pkgutil; " + (
    "[importlib.import_module(module.name) for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.')]"
)
TRAIN = "import ramify.train as room, ramify.train.remote_batch_source, ramify.train.sft.plan; " + (
    "room.TrainerConfig(loss={'id': 'gspo'}); room.load_loss('ppo')"
)


@pytest.mark.parametrize(
    "unused",  # by statement, of which each adds to what was loaded before
    [
        {
            "import ramify.rollout.evals.plan": {"rich", "uvicorn", "torch"},
            "import ramify; ramify.rl; ramify.sft": {"rich", "torch"},
            "import ramify.cli.eval": {"ramify.view.queries", "torch"},
        },
        {
            ORCHESTRATE: {"torch", "transformers", "vllm", "ramify.env.tasksets", "ramify.rollout.harness"},
            TRAIN: {"torch"},
            "from ramify.model import Manifest; import tools.tiny.stages": {"torch"},
        },
    ],
    ids=["evals and commands", "orchestrator and trainer"],
)
def test_unused_modules_are_not_loaded(unused):
    script = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in unused)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for names, (statement, modules) in zip(result.stdout.splitlines(), unused.items(), strict=True):
        loaded = set(names.split())
        assert "ramify" in loaded
        assert not modules & loaded, statement
