"""verifiers up to 0.3: rewards equal its own runner's, and three environments are evaluated and trained on."""

from pathlib import Path

from tests.env.adapters.verifiers_checks import compare_rewards, evaluate_and_train, make_importable

ENVIRONMENTS = ("calculator_tools", "guess_number", "rank_answers")


def check(python: Path, output: Path) -> None:
    make_importable("verifiers_v0")
    results = compare_rewards(python, "compare_v0.py", ENVIRONMENTS)
    broken = results["broken_rubric"]
    assert broken["ours"] == [None] and broken["errors"][0].startswith("lost: KeyError"), broken
    for name in ENVIRONMENTS:
        evaluate_and_train(python, output, {"env": name})
