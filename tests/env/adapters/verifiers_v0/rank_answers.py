"""An environment of v0 whose rubric has a group reward: the shortest answer of a group scores 1, the longest 0."""

import verifiers as vf
from datasets import Dataset


def load_environment(num_examples: int = 20) -> vf.Environment:
    rows = [{"question": f"Say something about {n}.", "answer": str(n)} for n in range(num_examples)]

    def mentions(completion, answer) -> float:
        return float(answer in str(completion[-1].content))

    def shortest(completions, **kwargs) -> list[float]:
        lengths = [len(str(completion[-1].content)) for completion in completions]
        low, high = min(lengths), max(lengths)
        return [1.0 if high == low else (high - length) / (high - low) for length in lengths]

    rubric = vf.Rubric(funcs=[mentions, shortest], weights=[0.5, 1.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
