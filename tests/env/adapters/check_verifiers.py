"""verifiers from 0.4 on: rewards equal its own runner's, and two tasksets are evaluated and trained on.

Two environments have two agents each: `kuhn-poker`, an unchanged copy from verifiers' repository (in
`verifiers_repository`, with its license), because PyPI does not have it, and `user-sim`, which is part of the package.
"""

from pathlib import Path

from tests.env.adapters.verifiers_checks import compare_rewards, evaluate_and_train, make_importable

TASKSETS = ("reverse-text-v1", "double-numbers-v1")
SEVERAL_AGENTS = ("kuhn-poker", "user-sim+reverse-text-v1")


def check(python: Path, output: Path) -> None:
    make_importable("verifiers_v1", "verifiers_repository")
    compare_rewards(python, "compare_v1.py", [*TASKSETS, *SEVERAL_AGENTS])
    for name in TASKSETS:
        evaluate_and_train(python, output, {"env": name, "agent": {"harness": {"id": "null"}}})
