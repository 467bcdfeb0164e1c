"""The first environment of verifiers' documentation, as a taskset of Ramify: `sums_v0.py` is the original form."""

from collections.abc import Iterator

import ramify as rf


class Sums(rf.Taskset):
    """Sums of two digits: the reply must contain the answer."""

    def load(self) -> Iterator[rf.Task]:
        """Yield the tasks: the rows of the dataset in verifiers."""
        for first in range(1, 5):
            for second in range(1, 5):
                yield rf.Task(prompt=f"What is {first}+{second}?", answer=str(first + second))

    @rf.reward
    def correct_answer(self, task: rf.Task, trace: rf.Trace) -> float:
        """Return 1 if the reply contains the answer: a function of the rubric in verifiers."""
        return float(task.answer in trace.last_reply)
