"""alphabet-sort: names arrive turn by turn, and each reply is to hold all of them so far, sorted, in tags.

A name is written FirstLast, so the key has to be found inside the word before anything can be sorted. The user is
scripted: what it says depends only on how many replies there were.
"""

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

import ramify as rf
from ramify.tasksets.drawing import distinct
from ramify.tasksets.naming import first_and_last
from ramify.tasksets.reading import replies

NEW = " // new name!"
POWER = 4
KEY = re.compile(r"(.[^A-Z]*)(.*)", re.DOTALL)

Key = Literal["first", "last"]


class AlphabetSortConfig(rf.TasksetConfig):
    """How long the conversations are, and how many names each turn brings."""

    num_tasks: int = Field(default=1000, ge=1)
    min_turns: int = Field(default=1, ge=1)
    max_turns: int = Field(default=3, ge=1, le=20)
    min_names: int = Field(default=1, ge=1)
    """New names in a turn, at least."""
    max_names: int = Field(default=5, ge=1, le=100)
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> "AlphabetSortConfig":
        for least, most in (("min_turns", "max_turns"), ("min_names", "max_names")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least} is {getattr(self, least)}, above {most}, which is {getattr(self, most)}")
        return self


class SortTask(rf.Task):
    """The names of each turn, in the order in which they are shown."""

    by: Key
    turns: tuple[tuple[str, ...], ...]


class Caller(rf.User):
    """Brings the names of the next turn until there are none left."""

    def respond(self, task: SortTask, trace: rf.Trace) -> str | None:
        turn = len(replies(trace))
        return request(task.by, turn, task.turns[turn]) if turn < len(task.turns) else None


class AlphabetSort(rf.Taskset):
    """Keep a growing list of names sorted by first or by last name."""

    config: AlphabetSortConfig
    task_type = SortTask

    def load(self) -> Iterator[SortTask]:
        few = "alphabet-sort: num_tasks is {count}, but only {found} were found; let turns bring more names"
        config = self.config
        return distinct(_draws(config), config.split, config.num_tasks, lambda task: str(task.turns), few)

    def user(self) -> rf.User:
        return Caller()

    @rf.reward
    def sorted_names(self, task: SortTask, trace: rf.Trace) -> float:
        """The mean of the turns' scores; a turn that was never answered scores 0."""
        return sum(_scores(task, trace)) / len(task.turns)

    @rf.metric
    def all_correct(self, task: SortTask, trace: rf.Trace) -> float:
        return float(all(value == 1.0 for value in _scores(task, trace)))

    def gold(self, task: SortTask) -> list[str]:
        return [block(tag(turn), expected(task.by, task.turns, turn)) for turn in range(len(task.turns))]


def tag(turn: int) -> str:
    return "combined_alphabetical_sorted" if turn else "alphabetical_sorted"


def block(tag: str, lines: Sequence[str]) -> str:
    """Lines as a reply is to hold them."""
    return "\n".join([f"<{tag}>", *lines, f"</{tag}>"])


def request(by: Key, turn: int, names: Sequence[str]) -> str:
    """What the user says in a turn."""
    if turn == 0:
        asked = f"Sort these names by {by} name inside <{tag(0)}> tags, one per line:"
    else:
        asked = (
            f"Now sort all names, old and new, by {by} name inside <{tag(turn)}> tags, one per line, "
            f"with `{NEW.strip()}` after each of these new ones:"
        )
    return "\n".join([asked, *names])


def sort_key(name: str, by: Key) -> str:
    """The part of a name to sort by: it is split at the first capital after the first letter."""
    parts = KEY.fullmatch(name)
    return "" if parts is None else parts[1 if by == "first" else 2]


def expected(by: Key, turns: Sequence[Sequence[str]], turn: int) -> list[str]:
    """The lines of a perfect reply to a turn; equal keys keep the order in which the names came."""
    known = [name for names in turns[: turn + 1] for name in names]
    new = set(turns[turn]) if turn else set[str]()
    return [name + NEW if name in new else name for name in sorted(known, key=lambda name: sort_key(name, by))]


def score(reply: str, tag: str, lines: Sequence[str]) -> float:
    """How close the tagged block of a reply is to `lines`, to the 4th power.

    Of several blocks the last counts, if each is better than the one before: an improvement is welcome, a second guess
    is not.
    """
    wanted = _written(lines)
    values = [_closeness(_written(found.split("\n")), wanted) for found in _blocks(reply, tag)]
    return values[-1] if values and all(later > earlier for earlier, later in pairwise(values)) else 0.0


def _scores(task: SortTask, trace: rf.Trace) -> list[float]:
    given = [*replies(trace), *[""] * len(task.turns)]
    turns = range(len(task.turns))
    return [score(given[turn], tag(turn), expected(task.by, task.turns, turn)) for turn in turns]


def _blocks(reply: str, tag: str) -> list[str]:
    return re.findall(f"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)


def _written(lines: Sequence[str]) -> str:
    return "\n".join(line.strip().lower() for line in lines if line.strip())


def _closeness(found: str, wanted: str) -> float:
    return difflib.SequenceMatcher(None, found, wanted).ratio() ** POWER


def _draws(config: AlphabetSortConfig) -> Iterator[SortTask]:
    rng = random.Random(f"alphabet-sort {config.split} {config.seed}")
    first, last = first_and_last()
    while True:
        by: Key = "first" if rng.random() < 0.5 else "last"
        sizes = [
            rng.randint(config.min_names, config.max_names)
            for _ in range(rng.randint(config.min_turns, config.max_turns))
        ]
        drawn: dict[str, None] = {}
        while len(drawn) < sum(sizes):
            drawn[rng.choice(first) + rng.choice(last)] = None
        left = iter(drawn)
        yield SortTask(by=by, turns=tuple(tuple(next(left) for _ in range(size)) for size in sizes))
