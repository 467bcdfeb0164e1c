"""An environment of v0 whose reward function raises: verifiers scores it 0.0."""

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    def lost(completion, answer) -> float:
        return {"a": 1.0}[answer]

    rows = [{"question": "Say a.", "answer": "b"}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[lost], weights=[1.0]))
