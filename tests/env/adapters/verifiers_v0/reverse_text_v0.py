"""The taskset reverse-text as an environment of v0: the same texts, prompts and rewards."""

import verifiers as vf
from datasets import Dataset

from ramify.env.tasksets import reversal
from ramify.env.tasksets.reverse_text import ReverseText


def load_environment() -> vf.Environment:
    rows = [{"question": task.prompt, "answer": task.answer} for task in ReverseText().load()]

    def similarity(completion, answer) -> float:
        return reversal.score_similarity(str(completion[-1].content), answer)

    dataset = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[similarity], weights=[1.0])
    return vf.SingleTurnEnv(dataset=dataset, system_prompt=reversal.SYSTEM, rubric=rubric)
