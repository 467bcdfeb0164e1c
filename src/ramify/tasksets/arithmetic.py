"""arithmetic: a small story in numbers, its result to be given in a box.

Every step is a sentence and an operation on the count so far; counts stay whole and never fall below zero, so each
step can be checked in the head and the result is one number.
"""

import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

import ramify as rf
from ramify.tasksets.drawing import distinct
from ramify.tasksets.reading import boxed, same_value

SYSTEM = "Put the final answer in \\boxed{}."

THINGS = (
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
SENTENCES: dict[Operation, tuple[str, ...]] = {
    "add": ("{n} more come.", "Somebody brings {n}.", "{n} are added.", "{n} more are found."),
    "subtract": ("{n} are taken away.", "{n} are sold.", "{n} get lost.", "Somebody takes {n}."),
    "multiply": ("Then there are {n} times as many.", "Their number grows to {n} times what it was."),
    "divide": ("They are shared equally by {n} people, and one share stays.", "Only one in {n} stays."),
}


class ArithmeticConfig(rf.TasksetConfig):
    """How long the stories are, and what happens in them."""

    num_tasks: int = Field(default=1000, ge=1)
    min_steps: int = Field(default=2, ge=1)
    max_steps: int = Field(default=4, ge=1, le=50)
    max_number: int = Field(default=20, ge=2, le=10**6)
    """The largest number in a sentence; factors and divisors go up to 5."""
    operations: tuple[Operation, ...] = Field(default=("add", "subtract", "multiply", "divide"), min_length=1)
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> "ArithmeticConfig":
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps is {self.min_steps}, above max_steps, which is {self.max_steps}")
        if set(self.operations) == {"divide"}:
            raise ValueError("operations: after a few divisions nothing is left to divide; allow another one too")
        return self


class Arithmetic(rf.Taskset):
    """Small word problems with one number as their answer."""

    config: ArithmeticConfig

    def load(self) -> Iterator[rf.Task]:
        config = self.config
        few = "arithmetic: num_tasks is {count}, but only {found} were found; allow more steps or larger numbers"
        for story, result in distinct(_stories(config), config.split, config.num_tasks, lambda drawn: drawn[0], few):
            yield rf.Task(prompt=story, system=SYSTEM, answer=str(result))

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        """1 if the last box holds the result, else 0."""
        found = boxed(trace.last_reply)
        return float(found is not None and same_value(found, task.answer))

    def gold(self, task: rf.Task) -> str:
        return f"\\boxed{{{task.answer}}}"


def apply(operation: Operation, count: int, number: int) -> int:
    """What is left after a step."""
    match operation:
        case "add":
            return count + number
        case "subtract":
            return count - number
        case "multiply":
            return count * number
        case "divide":
            return count // number


def _stories(config: ArithmeticConfig) -> Iterator[tuple[str, int]]:
    rng = random.Random(f"arithmetic {config.split} {config.seed}")
    while True:
        count = rng.randint(2, config.max_number)
        told = [f"There are {count} {rng.choice(THINGS)} {rng.choice(PLACES)}."]
        for _ in range(rng.randint(config.min_steps, config.max_steps)):
            operation = rng.choice(config.operations)
            numbers = _possible(operation, count, config.max_number)
            if not numbers:
                break
            number = rng.choice(numbers)
            count = apply(operation, count, number)
            told.append(rng.choice(SENTENCES[operation]).format(n=number))
        else:
            yield " ".join([*told, "How many are there now?"]), count
            continue
        yield "", 0  # a step that this count does not allow: a draw all the same, so that a dead end is noticed


def _possible(operation: Operation, count: int, largest: int) -> range | list[int]:
    """The numbers a step may take."""
    match operation:
        case "add":
            return range(2, largest + 1)
        case "subtract":
            return range(2, min(count, largest) + 1)
        case "multiply":
            return range(2, 6) if count <= 10 * largest else range(0)
        case "divide":
            return [number for number in range(2, 6) if count and count % number == 0]
