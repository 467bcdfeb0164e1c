"""arithmetic: short word problems whose result must be given in \\boxed{}.

Every step is a sentence and an operation on the current count. Counts are integers and never negative.
"""

import operator
import random
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

import ramify as rf
from ramify.env.tasksets.answers import extract_boxed, is_same_value
from ramify.env.tasksets.splits import RangesConfig, draw_distinct

SYSTEM = "Put the final answer in \\boxed{}."

OBJECTS = (
    "apples",
    "books",
    "boxes",
    "cards",
    "chairs",
    "coins",
    "cups",
    "eggs",
    "keys",
    "lamps",
    "nuts",
    "pears",
    "plates",
    "shells",
    "stamps",
    "stones",
)
PLACES = ("on a table", "in a shop", "in a basket", "in a room", "on a cart", "in a shed", "on a shelf", "in a ship")

Operation = Literal["add", "subtract", "multiply", "divide"]
OPERATORS: dict[Operation, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,
}
SENTENCES: dict[Operation, tuple[str, ...]] = {
    "add": ("{n} more come.", "Somebody brings {n}.", "{n} are added.", "{n} more are found."),
    "subtract": ("{n} are taken away.", "{n} are sold.", "{n} get lost.", "Somebody takes {n}."),
    "multiply": ("Then there are {n} times as many.", "Their number grows to {n} times what it was."),
    "divide": ("They are shared equally by {n} people, and one share stays.", "Only one in {n} stays."),
}


class ArithmeticConfig(RangesConfig, rf.TasksetConfig):
    """The length of the stories, and the operations in them."""

    num_tasks: int = Field(default=1000, ge=1)
    min_steps: int = Field(default=2, ge=1)
    max_steps: int = Field(default=4, ge=1, le=50)
    max_number: int = Field(default=20, ge=2, le=10**6)
    """The largest number in a sentence; factors and divisors are at most 5."""
    operations: tuple[Operation, ...] = Field(default=("add", "subtract", "multiply", "divide"), min_length=1)
    seed: int = 0

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield operations with which too few stories are possible."""
        if set(self.operations) == {"divide"}:
            yield "operations", "divide alone gives too few stories; allow another operation too"


class Arithmetic(rf.Taskset):
    """Short word problems with one number as the answer."""

    config: ArithmeticConfig

    def load(self) -> Iterator[rf.Task]:
        """Draw `num_tasks` distinct problems of the split."""
        config = self.config
        too_few_message = (
            "arithmetic: num_tasks is {count}, but only {found} were found; allow more steps or larger numbers"
        )
        for story, result in draw_distinct(
            _draw_stories(config), config.split, config.num_tasks, lambda drawn: drawn[0], too_few_message
        ):
            yield rf.Task(prompt=story, system=SYSTEM, answer=str(result))

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        """1 if the last \\boxed{} holds the result, else 0."""
        answer = extract_boxed(trace.last_reply)
        return float(answer is not None and is_same_value(answer, task.answer))

    def gold(self, task: rf.Task) -> str:
        """Return the answer in `\\boxed{}`."""
        return f"\\boxed{{{task.answer}}}"


def _draw_stories(config: ArithmeticConfig) -> Iterator[tuple[str, int]]:
    rng = random.Random(f"arithmetic {config.split} {config.seed}")
    while True:
        count = rng.randint(2, config.max_number)
        sentences = [f"There are {count} {rng.choice(OBJECTS)} {rng.choice(PLACES)}."]
        for _ in range(rng.randint(config.min_steps, config.max_steps)):
            operation = rng.choice(config.operations)
            numbers = _allowed_numbers(operation, count, config.max_number)
            if not numbers:
                break
            number = rng.choice(numbers)
            count = OPERATORS[operation](count, number)
            sentences.append(rng.choice(SENTENCES[operation]).format(n=number))
        else:
            yield " ".join([*sentences, "How many are there now?"]), count
            continue
        yield "", 0  # no number is allowed for this step: an empty draw, so that impossible configs are detected


def _allowed_numbers(operation: Operation, count: int, max_number: int) -> range | list[int]:
    """Return the numbers that a step may use."""
    match operation:
        case "add":
            return range(2, max_number + 1)
        case "subtract":
            return range(2, min(count, max_number) + 1)
        case "multiply":
            return range(2, 6) if count <= 10 * max_number else range(0)
        case "divide":
            return [number for number in range(2, 6) if count and count % number == 0]
