"""alphabet-sort: names arrive turn by turn; each reply must list all names so far, sorted, in tags.

A name is written FirstLast, so the sort key is a part of the word. The user is scripted: its message depends only on
the number of replies.
"""

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pydantic import Field

import ramify as rf
from ramify.env.tasksets.answers import get_replies
from ramify.env.tasksets.splits import RangesConfig, draw_distinct, load_names

NEW_NAME_SUFFIX = " // new name!"
SIMILARITY_POWER = 4
NAME_PATTERN = re.compile(r"(.[^A-Z]*)(.*)", re.DOTALL)

SortKey = Literal["first", "last"]


class AlphabetSortConfig(RangesConfig, rf.TasksetConfig):
    """The number of turns per conversation, and of new names per turn."""

    num_tasks: int = Field(default=1000, ge=1)
    min_turns: int = Field(default=1, ge=1)
    max_turns: int = Field(default=3, ge=1, le=20)
    min_names: int = Field(default=1, ge=1)
    """Minimum number of new names in a turn."""
    max_names: int = Field(default=5, ge=1, le=100)
    seed: int = 0


class AlphabetSortTask(rf.Task):
    """`by` is the part of a name to sort by; `turns` are the new names of each turn, in the order shown."""

    by: SortKey
    turns: tuple[tuple[str, ...], ...]


class NamesUser(rf.User):
    """Sends the names of the next turn, until there are none left."""

    def respond(self, task: AlphabetSortTask, trace: rf.Trace) -> str | None:
        """Ask for the names of the next turn; end the conversation after the last one."""
        turn = len(get_replies(trace))
        return format_request(task.by, turn, task.turns[turn]) if turn < len(task.turns) else None


class AlphabetSort(rf.Taskset):
    """Keep a growing list of names sorted by first or by last name."""

    config: AlphabetSortConfig
    task_type = AlphabetSortTask

    def load(self) -> Iterator[AlphabetSortTask]:
        """Draw `num_tasks` distinct tasks of the split."""
        too_few_message = "alphabet-sort: num_tasks is {count}, but only {found} were found; let turns bring more names"
        config = self.config
        return draw_distinct(
            _draw_tasks(config), config.split, config.num_tasks, lambda task: str(task.turns), too_few_message
        )

    def user(self) -> rf.User:
        """Return the user, who asks for one sorted list per turn."""
        return NamesUser()

    @rf.reward
    def sorted_names(self, task: AlphabetSortTask, trace: rf.Trace) -> float:
        """The mean score of the turns; an unanswered turn scores 0."""
        return sum(_score_turns(task, trace)) / len(task.turns)

    @rf.metric
    def all_correct(self, task: AlphabetSortTask, trace: rf.Trace) -> float:
        """Whether every turn scores 1."""
        return float(all(score == 1.0 for score in _score_turns(task, trace)))

    def gold(self, task: AlphabetSortTask) -> list[str]:
        """Return the sorted list of each turn."""
        return [
            format_block(get_tag_name(turn), build_expected_lines(task.by, task.turns, turn))
            for turn in range(len(task.turns))
        ]


def get_tag_name(turn: int) -> str:
    """Return the tag of the reply to a turn."""
    return "combined_alphabetical_sorted" if turn else "alphabetical_sorted"


def format_block(tag: str, lines: Sequence[str]) -> str:
    """Return lines in the form that a reply must have."""
    return "\n".join([f"<{tag}>", *lines, f"</{tag}>"])


def format_request(by: SortKey, turn: int, names: Sequence[str]) -> str:
    """Return the user's message of a turn."""
    if turn == 0:
        instruction = f"Sort these names by {by} name inside <{get_tag_name(0)}> tags, one per line:"
    else:
        instruction = (
            f"Now sort all names, old and new, by {by} name inside <{get_tag_name(turn)}> tags, one per line, "
            f"with `{NEW_NAME_SUFFIX.strip()}` after each of these new ones:"
        )
    return "\n".join([instruction, *names])


def sort_key(name: str, by: SortKey) -> str:
    """Return the part of a name to sort by. A name is split at the first capital after its first letter."""
    parts = NAME_PATTERN.fullmatch(name)
    return "" if parts is None else parts[1 if by == "first" else 2]


def build_expected_lines(by: SortKey, turns: Sequence[Sequence[str]], turn: int) -> list[str]:
    """Return the lines of a perfect reply to a turn. Names with equal keys keep their order."""
    names_so_far = [name for names in turns[: turn + 1] for name in names]
    new_names = set(turns[turn]) if turn else set[str]()
    return [
        name + NEW_NAME_SUFFIX if name in new_names else name
        for name in sorted(names_so_far, key=lambda name: sort_key(name, by))
    ]


def score_reply(reply: str, tag: str, expected_lines: Sequence[str]) -> float:
    """Return the similarity of the tagged block of a reply to `expected_lines`, to the 4th power.

    Of several blocks the last one counts if each scores higher than the one before; otherwise the score is 0.
    """
    expected_text = _normalize_lines(expected_lines)
    blocks: list[str] = re.findall(f"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)
    texts = [_normalize_lines(block.split("\n")) for block in blocks]
    scores = [difflib.SequenceMatcher(None, text, expected_text).ratio() ** SIMILARITY_POWER for text in texts]
    return scores[-1] if scores and all(later > earlier for earlier, later in pairwise(scores)) else 0.0


def _score_turns(task: AlphabetSortTask, trace: rf.Trace) -> list[float]:
    replies_by_turn = [*get_replies(trace), *[""] * len(task.turns)]
    return [
        score_reply(replies_by_turn[turn], get_tag_name(turn), build_expected_lines(task.by, task.turns, turn))
        for turn in range(len(task.turns))
    ]


def _normalize_lines(lines: Sequence[str]) -> str:
    return "\n".join(line.strip().lower() for line in lines if line.strip())


def _draw_tasks(config: AlphabetSortConfig) -> Iterator[AlphabetSortTask]:
    rng = random.Random(f"alphabet-sort {config.split} {config.seed}")
    first, last = load_names()
    while True:
        by: SortKey = "first" if rng.random() < 0.5 else "last"
        sizes = [
            rng.randint(config.min_names, config.max_names)
            for _ in range(rng.randint(config.min_turns, config.max_turns))
        ]
        names: dict[str, None] = {}
        while len(names) < sum(sizes):
            names[rng.choice(first) + rng.choice(last)] = None
        remaining_names = iter(names)
        yield AlphabetSortTask(by=by, turns=tuple(tuple(next(remaining_names) for _ in range(size)) for size in sizes))
