"""The split of a task, distinct random tasks of one split, and the bundled names of people.

A task belongs to `train` or `eval` by the hash of its text, not by a seed, so the splits of any two configs are
disjoint.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import model_validator

import ramify as rf
from ramify.core.errors import ConfigInvalid

NAMES_FILE = Path(__file__).with_name("names.txt")


@cache
def load_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the bundled first names and last names."""
    first, last = (tuple(line.partition(":")[2].split()) for line in NAMES_FILE.read_text("utf-8").splitlines())
    return first, last


# The check of ranges in the config of a taskset.


class RangesConfig(rf.Config):
    """A config in which `min_NAME` must not exceed `max_NAME`, for every such pair of keys."""

    @model_validator(mode="after")
    def _min_must_not_exceed_max(self) -> Self:
        for max_key in type(self).model_fields:
            min_key, high = max_key.replace("max_", "min_", 1), getattr(self, max_key)
            if min_key != max_key and (low := getattr(self, min_key, high)) > high:
                raise ValueError(f"{min_key} is {low}, above {max_key}, which is {high}")
        return self


EVAL_SHARE = 0.2
MAX_IDLE_DRAWS = 1000  # consecutive draws without a new task

Split = Literal["train", "eval"]
T = TypeVar("T")


def assign_split(text: str, eval_share: float = EVAL_SHARE) -> Split:
    """Return the split of the task with this text."""
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "eval" if draw < eval_share else "train"


def draw_distinct(
    draws: Iterable[T], split: Split, count: int, get_text: Callable[[T], str], too_few_message: str
) -> Iterator[T]:
    """Yield the first `count` draws of the split that have different, non-empty texts.

    `draws` may be infinite. Raises ConfigInvalid with `too_few_message`, a format string with the fields `count` and
    `found`, after MAX_IDLE_DRAWS draws without a new task.
    """
    seen: set[str] = set()
    idle_draws = 0
    for draw in draws:
        if len(seen) == count:
            return
        task_text = get_text(draw)
        if not task_text or task_text in seen or assign_split(task_text) != split:
            idle_draws += 1
            if idle_draws == MAX_IDLE_DRAWS:
                raise ConfigInvalid(too_few_message.format(count=count, found=len(seen)))
            continue
        idle_draws = 0
        seen.add(task_text)
        yield draw
