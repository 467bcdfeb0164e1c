"""A task for code that calls the model, and a script of a policy that solves it so."""

import random
from collections.abc import Iterator

import ramify as rf
from tests.rollout.helpers import tool_call

CODE = "parts = [llm('Say 1'), llm('Say 2'), *llm_batch(['Say 3', 'Say 4', 'Say 5'])]\nprint(parts)"
NUM_CALLS = 5  # of llm in this code


class Recursion(rf.Taskset):
    """The reward is the last digit of the answer."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(4):
            yield rf.Task(prompt=f"Ask for digits, {number}.", key=f"task-{number}")

    @rf.reward
    def last_digit(self, trace: rf.Trace) -> float:
        return int(trace.last_reply[-1]) / 9


def reply_to(prompt: str, seed: int) -> str:
    """Return the reply of the policy: a digit to a call of llm, code to the task."""
    digit = random.Random(seed).randrange(10)
    if "Ask for digits" not in prompt:
        return str(digit)
    if "</tool_response>" not in prompt:
        return tool_call("python", code=CODE)
    return tool_call("python", code=f"answer = ''.join(parts) + '{digit}'")
