"""Which tasks a config gives: draws from a seed, each kept once, and only in the split it belongs to.

A task belongs to `train` or `eval` by the hash of what it asks, not by a seed: whatever two configs choose, the splits
never meet.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from ramify.errors import ConfigInvalid

EVAL_SHARE = 0.2
MAX_IDLE_DRAWS = 1000  # draws in a row without a new task before we say that there are no more

Split = Literal["train", "eval"]
T = TypeVar("T")


def assign_split(text: str, eval_share: float = EVAL_SHARE) -> Split:
    """The split that what is written here belongs to, for ever."""
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "eval" if draw < eval_share else "train"


def draw_distinct(
    draws: Iterable[T], split: Split, count: int, get_text: Callable[[T], str], too_few_message: str
) -> Iterator[T]:
    """The first `count` draws of the split whose texts differ; an empty text is no draw.

    `draws` may be endless. Where they bring nothing new any more, ConfigInvalid says how many there were and `few`: of
    what, and what to do.
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
