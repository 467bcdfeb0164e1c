"""verifiers from 0.4 on: rewards equal its own runner's, and two tasksets are evaluated and trained on."""

from pathlib import Path

from tests.env.adapters.verifiers_checks import compare_rewards, evaluate_and_train, make_importable

ENVIRONMENTS = ("reverse-text-v1", "double-numbers-v1")


def check(python: Path, output: Path) -> None:
    make_importable("verifiers_v1")
    compare_rewards(python, "compare_v1.py", ENVIRONMENTS)
    for name in ENVIRONMENTS:
        evaluate_and_train(python, output, {"env": name, "agent": {"harness": {"id": "null"}}})
