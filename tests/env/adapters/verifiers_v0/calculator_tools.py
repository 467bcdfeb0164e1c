"""A tool environment of v0, after verifiers' documentation: tools are functions, the rubric reads the tool results."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return str(a + b)


def multiply(a: int, b: int) -> str:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return str(a * b)


def load_environment(num_examples: int = 20, max_turns: int = 4) -> vf.Environment:
    rows = [{"question": f"What is {n} * {n + 1}?", "answer": str(n * (n + 1))} for n in range(2, 2 + num_examples)]

    def correct(completion, answer) -> float:
        return float(answer in str(completion[-1].content))

    def used_tool(completion) -> float:
        return float(any(message.role == "tool" for message in completion))

    def short(completion) -> float:
        return 1.0 / (1.0 + len(str(completion[-1].content)))

    rubric = vf.Rubric(funcs=[correct, used_tool, short], weights=[1.0, 0.5, 0.1])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add, multiply], max_turns=max_turns, rubric=rubric)
