"""A task for a shell, and a script of an agent that works on it in several branches.

The agent appends digits to a file with one command each. It cannot remember more than its summary says.
"""

import random
import re
from collections.abc import Iterator
from statistics import fmean

import ramify as rf
from ramify.harness.compaction import SUMMARY_REQUEST
from tests.rollout.helpers import tool_call

NUM_DIGITS = 4


class NoteTaking(rf.Taskset):
    """The reward is the mean of the digits in the file."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(4):
            yield rf.Task(system="Count.", prompt=f"Write {NUM_DIGITS} digits for {number}.", key=f"task-{number}")

    @rf.reward
    async def mean_digit(self, runtime: rf.Runtime) -> float:
        return fmean(await read_digits(runtime)) / 9

    @rf.metric
    async def num_digits(self, runtime: rf.Runtime) -> float:
        return float(len(await read_digits(runtime)))


async def read_digits(runtime: rf.Runtime) -> list[int]:
    return [int(line) for line in (await runtime.read("digits.txt")).split()]


def reply_to(prompt: str, seed: int) -> str:
    """Return the agent's reply: the next command, a summary, or the answer."""
    remembered = re.findall(r"I wrote (\d) digits", prompt)
    num_written = int(remembered[-1] if remembered else 0) + prompt.count("</tool_response>")
    if SUMMARY_REQUEST.text in prompt:
        return f"I wrote {num_written} digits."
    if num_written == NUM_DIGITS:
        return "I wrote all digits."
    digit = random.Random(seed).randrange(10)
    return tool_call("bash", command=f"echo {digit} >> digits.txt; wc -l digits.txt")
