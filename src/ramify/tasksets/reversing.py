"""Texts to be reversed, and how well a reply reversed one: the part of reverse-text that needs no environment.

The recipe of `tiny` is made of these too, so nothing here imports `ramify.env`.
"""

import difflib
import random
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import Field, model_validator

from ramify.config import Config
from ramify.errors import ConfigInvalid
from ramify.tasksets.drawing import Split, distinct, split_of

SYSTEM = "Reverse the text character by character. Answer inside <reversed_text> tags."
TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
WORDS = Path(__file__).with_name("words.txt")


class Texts(Config):
    """What the texts look like. The defaults are the default example."""

    split: Split = "train"
    num_tasks: int = Field(default=1000, ge=1)
    min_chars: int = Field(default=4, ge=1)
    max_chars: int = Field(default=8, ge=1)
    alphabet: str = string.ascii_lowercase + " "
    """The characters that texts may hold; without the space, words are written together."""
    path: Path | None = None
    """A file of one text per line, instead of texts made from words; lengths and alphabet do not apply to it."""
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> "Texts":
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars is {self.min_chars}, above max_chars, which is {self.max_chars}")
        return self


def texts(config: Texts) -> Iterator[str]:
    """The texts of the config's split, all different: `num_tasks` of them, or as many as the file has."""
    if config.path is not None:
        mine = (line for line in _lines(config.path) if split_of(line) == config.split)
        yield from list(dict.fromkeys(mine))[: config.num_tasks]
        return
    few = (
        "reverse-text: num_tasks is {count}, but only {found} texts of "
        f"{config.min_chars} to {config.max_chars} characters were found; widen the lengths or the alphabet"
    )
    yield from distinct(_sentences(config), config.split, config.num_tasks, str, few)


def answer(text: str) -> str:
    """The text, reversed."""
    return text[::-1]


def tagged(text: str) -> str:
    """A reply as the system prompt asks for it."""
    return f"<reversed_text>{text}</reversed_text>"


def extract(reply: str) -> str:
    """What the first pair of tags holds, stripped; empty if there is none."""
    found = TAGGED.search(reply)
    return found[1].strip() if found else ""


def similarity(reply: str, answer: str) -> float:
    """2·matches / (length of both), as `difflib` counts matches; `reply` is the whole reply."""
    return difflib.SequenceMatcher(None, extract(reply), answer).ratio()


def exact(reply: str, answer: str) -> float:
    """Whether the reply's text is the answer."""
    return float(extract(reply) == answer)


def well_formed(reply: str) -> bool:
    """Whether the reply is one pair of tags with something between them, and nothing else."""
    return bool(extract(reply)) and TAGGED.fullmatch(reply.strip()) is not None and reply.count("<reversed_text>") == 1


def _sentences(config: Texts) -> Iterator[str]:
    rng = random.Random(f"reverse-text {config.split} {config.seed}")
    between = " " if " " in config.alphabet else ""
    known = [word for word in words() if set(word) <= set(config.alphabet) and len(word) <= config.max_chars]
    if not known:
        raise ConfigInvalid(f"reverse-text: no word is made of the alphabet {config.alphabet!r}")
    while True:
        wanted = rng.randint(config.min_chars, config.max_chars)
        text = rng.choice(known)
        while len(text) < wanted:
            text += between + rng.choice(known)
        # What overshoots is a draw all the same, an empty one, so that impossible lengths are noticed.
        yield text if config.min_chars <= len(text) <= config.max_chars else ""


def _lines(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigInvalid(f"reverse-text: path {path} cannot be read: {error.strerror}") from error
    return (line.strip() for line in lines if line.strip())


@cache
def words() -> tuple[str, ...]:
    """The bundled list of common English words."""
    return tuple(WORDS.read_text("utf-8").split())
