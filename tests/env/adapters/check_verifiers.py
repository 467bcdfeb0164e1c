"""verifiers from 0.4 on: rewards equal its own runner's, and two tasksets are evaluated and trained on.

Two environments have two agents each: `user-sim`, which is part of the package, and `kuhn-poker`, which PyPI does not
have: it is compared if VERIFIERS_ENVIRONMENTS names the folder of environments in a clone of verifiers' repository.
"""

import os
from pathlib import Path

from tests.env.adapters.verifiers_checks import compare_rewards, evaluate_and_train, make_importable

TASKSETS = ("reverse-text-v1", "double-numbers-v1")
SEVERAL_AGENTS = "user-sim+reverse-text-v1"


def check(python: Path, output: Path) -> None:
    cloned = os.environ.get("VERIFIERS_ENVIRONMENTS", "")
    make_importable("verifiers_v1", *([str(Path(cloned, "kuhn_poker").absolute())] if cloned else []))
    names = [*TASKSETS, SEVERAL_AGENTS, *(["kuhn-poker"] if cloned else [])]
    compare_rewards(python, "compare_v1.py", names)
    if not cloned:
        print("   kuhn-poker: skipped, VERIFIERS_ENVIRONMENTS is not set", flush=True)
    for name in TASKSETS:
        evaluate_and_train(python, output, {"env": name, "agent": {"harness": {"id": "null"}}})
