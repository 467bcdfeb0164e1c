"""color-codeword: coloured squares stand for letters; each reply must spell the codeword so far.

Every turn shows more squares. The images are made when they are sent, so a task holds only the codeword. Tasks, images
and scores follow Prime Intellect's environment of this name, which has no splits.
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
from ramify.env.tasksets.splits import draw_distinct

SQUARE_PIXELS = 100
COLORS = {
    "A": ("red", (255, 0, 0)),
    "B": ("green", (0, 255, 0)),
    "C": ("blue", (0, 0, 255)),
    "D": ("yellow", (255, 255, 0)),
    "E": ("purple", (128, 0, 128)),
    "F": ("cyan", (0, 255, 255)),
    "G": ("orange", (255, 165, 0)),
    "H": ("white", (255, 255, 255)),
    "I": ("black", (0, 0, 0)),
}
MAPPING = ", ".join(f"{name.capitalize()}={letter}" for letter, (name, _) in COLORS.items())
SYSTEM = f"""You are shown squares, some in each turn. The colour of a square stands for a letter:

{MAPPING}

The letters of all turns, in order, are the codeword. If the first turn shows red and blue squares and the second one \
green and yellow squares, the codeword is ACBD.

In every turn, write the codeword so far: ONLY its letters, with NO spaces."""
BRIEF_SYSTEM = "Squares stand for letters: " + ", ".join(f"{name} {c}" for c, (name, _) in COLORS.items()) + "."
BRIEF_REQUEST = "Write the codeword so far, letters only, no spaces."


class ColorCodewordConfig(rf.TasksetConfig):
    """The length of the conversations, and how a codeword that is partly right is scored."""

    num_tasks: int = Field(default=1000, ge=1)
    num_turns: int = Field(default=3, ge=1, le=20)
    num_squares: int = Field(default=2, ge=1, le=10)
    """Squares in a turn."""
    partial_credit: bool = False
    """Whether the reward is the share of right letters instead of 0 for a codeword with a wrong letter."""
    brief_prompt: bool = False
    """Whether the prompt is the short one that `tiny-vision` was trained on."""
    seed: int = 42


class ColorCodewordTask(rf.Task):
    """`turns` are the letters of each turn, drawn with `seed`; `answer` is the whole codeword."""

    turns: tuple[str, ...]
    seed: int


class SquaresUser(rf.User):
    """Shows the squares of the next turn, until there are none left."""

    def __init__(self, *, is_brief: bool) -> None:
        self._is_brief = is_brief

    def respond(self, task: ColorCodewordTask, turn: int) -> list[dict[str, Any]] | None:
        """Return the squares of a turn and the request; end the conversation after the last turn."""
        if turn == len(task.turns):
            return None
        request = BRIEF_REQUEST if self._is_brief else format_request(task, turn)
        images = [{"type": "image_url", "image_url": {"url": make_square_url(letter)}} for letter in task.turns[turn]]
        return [*images, {"type": "text", "text": request}]


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
        return SquaresUser(is_brief=self.config.brief_prompt)

    @rf.reward
    def codeword(self, task: ColorCodewordTask, trace: rf.Trace) -> float:
        """1 if the last reply spells the codeword, else 0; with `partial_credit` the share of right letters."""
        if self.config.partial_credit:
            return score_letters(task, trace)
        return float(find_codeword(trace.last_reply) == task.answer)

    @rf.metric
    def partial_match(self, task: ColorCodewordTask, trace: rf.Trace) -> float:
        """The share of letters that are right in the last reply."""
        return score_letters(task, trace)

    def gold(self, task: ColorCodewordTask) -> list[str]:
        """Return the codeword so far, for each turn."""
        return ["".join(task.turns[: turn + 1]) for turn in range(len(task.turns))]


def format_request(task: ColorCodewordTask, turn: int) -> str:
    """Return the text that is shown with the squares of a turn."""
    count = f"{len(task.turns[turn])} {'more ' if turn else ''}squares."
    is_last = 0 < turn == len(task.turns) - 1
    return f"{count} Add their letters to your last answer, and write all {len(task.answer)}." if is_last else count


def find_codeword(reply: str) -> str:
    """Return the longest word of letters A to I in a reply, the first of several; without any, all such letters.

    Lower-case letters count as capitals.
    """
    letters = reply.upper()
    return max(re.findall(r"\b[A-I]+\b", letters), key=len, default="") or "".join(re.findall("[A-I]", letters))


def score_letters(task: ColorCodewordTask, trace: rf.Trace) -> float:
    """Return the share of the codeword's letters that the last reply has in their place."""
    codeword = find_codeword(trace.last_reply)
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


def _draw_tasks(config: ColorCodewordConfig) -> Iterator[ColorCodewordTask]:
    rng = random.Random(config.seed)
    system = BRIEF_SYSTEM if config.brief_prompt else SYSTEM
    while True:
        codeword = "".join(rng.choice(list(COLORS)) for _ in range(config.num_turns * config.num_squares))
        turns = tuple(re.findall("." * config.num_squares, codeword))
        yield ColorCodewordTask(system=system, turns=turns, answer=codeword, seed=config.seed)
