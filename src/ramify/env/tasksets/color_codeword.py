"""color-codeword: coloured squares stand for letters; each reply must spell the codeword so far.

Every turn shows more squares. The images are made when they are sent, so a task holds only the codeword.
"""

import base64
import random
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import Field

import ramify as rf
from ramify.env.tasksets.answers import get_replies
from ramify.env.tasksets.splits import draw_distinct

SQUARE_PIXELS = 100
COLORS = {
    "A": ("red", (255, 0, 0)),
    "B": ("green", (0, 128, 0)),
    "C": ("blue", (0, 0, 255)),
    "D": ("yellow", (255, 255, 0)),
    "E": ("purple", (128, 0, 128)),
    "F": ("cyan", (0, 255, 255)),
    "G": ("orange", (255, 165, 0)),
    "H": ("white", (255, 255, 255)),
    "I": ("black", (0, 0, 0)),
}
SYSTEM = "Squares stand for letters: " + ", ".join(f"{name} {letter}" for letter, (name, _) in COLORS.items()) + "."
REQUEST = "Write the codeword so far, letters only, no spaces."


class ColorCodewordConfig(rf.TasksetConfig):
    """The length of the conversations, and how a codeword that is partly right is scored."""

    num_tasks: int = Field(default=1000, ge=1)
    num_turns: int = Field(default=3, ge=1, le=20)
    num_squares: int = Field(default=2, ge=1, le=10)
    """Squares in a turn."""
    partial_credit: bool = False
    """Whether the reward is the share of right letters instead of 0 for a codeword with a wrong letter."""
    seed: int = 0


class ColorCodewordTask(rf.Task):
    """`turns` are the letters of each turn; `answer` is the whole codeword."""

    turns: tuple[str, ...]


class SquaresUser(rf.User):
    """Shows the squares of the next turn, until there are none left."""

    def respond(self, task: ColorCodewordTask, turn: int) -> list[dict[str, Any]] | None:
        """Return the squares of a turn and the request; end the conversation after the last turn."""
        if turn == len(task.turns):
            return None
        images = [{"type": "image_url", "image_url": {"url": make_square_url(letter)}} for letter in task.turns[turn]]
        return [*images, {"type": "text", "text": REQUEST}]


class ColorCodeword(rf.Taskset):
    """Spell a codeword whose letters are shown as coloured squares."""

    config: ColorCodewordConfig
    task_type = ColorCodewordTask
    requires_vision = True

    def load(self) -> Iterator[ColorCodewordTask]:
        """Draw `num_tasks` distinct codewords of the split."""
        config = self.config
        too_few_message = "color-codeword: num_tasks is {count}, but only {found} were found; show more squares"
        return draw_distinct(
            _draw_tasks(config), config.split, config.num_tasks, lambda task: str(task.answer), too_few_message
        )

    def user(self) -> rf.User:
        """Return the user, who shows the squares."""
        return SquaresUser()

    @rf.reward
    def codeword(self, task: ColorCodewordTask, trace: rf.Trace) -> float:
        """1 if the last reply spells the codeword, else 0; with `partial_credit` the share of right letters."""
        if self.config.partial_credit:
            return score_letters(task, trace)
        return float(find_codeword(_get_last_reply(task, trace)) == task.answer)

    @rf.metric
    def partial_match(self, task: ColorCodewordTask, trace: rf.Trace) -> float:
        """The share of letters that are right in the last reply."""
        return score_letters(task, trace)

    def gold(self, task: ColorCodewordTask) -> list[str]:
        """Return the codeword so far, for each turn."""
        return ["".join(task.turns[: turn + 1]) for turn in range(len(task.turns))]


def find_codeword(reply: str) -> str:
    """Return the longest run of letters A to I in a reply; of several, the first."""
    return max(re.findall("[A-I]+", reply), key=len, default="")


def score_letters(task: ColorCodewordTask, trace: rf.Trace) -> float:
    """Return the share of the codeword's letters that the last reply has in their place."""
    codeword = find_codeword(_get_last_reply(task, trace))
    return sum(letter == right for letter, right in zip(codeword, task.answer)) / len(task.answer)


@cache
def make_square_url(letter: str) -> str:
    """Return the square of a letter as a data URL."""
    _, color = COLORS[letter]
    return f"data:image/png;base64,{base64.b64encode(make_square(color)).decode()}"


def make_square(color: Sequence[int], pixels: int = SQUARE_PIXELS) -> bytes:
    """Return a square of one colour as a PNG."""
    rows = (b"\0" + bytes(color) * pixels) * pixels  # every row begins with the number of its filter: none
    header = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _get_last_reply(task: ColorCodewordTask, trace: rf.Trace) -> str:
    """Return the reply to the last turn; empty if the conversation ended before."""
    replies = get_replies(trace)
    return replies[-1] if len(replies) == len(task.turns) else ""


def _draw_tasks(config: ColorCodewordConfig) -> Iterator[ColorCodewordTask]:
    rng = random.Random(f"color-codeword {config.split} {config.seed}")
    while True:
        turns = ["".join(rng.choices(list(COLORS), k=config.num_squares)) for _ in range(config.num_turns)]
        yield ColorCodewordTask(system=SYSTEM, turns=tuple(turns), answer="".join(turns))
