"""Sums of two digits, as an environment of verifiers v0, in the form of the first one in its documentation."""

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    """Return the environment that the id `sums_v0` names."""
    pairs = [(first, second) for first in range(1, 5) for second in range(1, 5)]
    rows = [{"question": f"What is {first}+{second}?", "answer": str(first + second)} for first, second in pairs]

    def correct_answer(completion: list, answer: str) -> float:
        return float(answer in str(completion[-1].content))

    rubric = vf.Rubric(funcs=[correct_answer], weights=[1.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
