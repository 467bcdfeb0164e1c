"""The texts and scores of reverse-text.

The recipe of `tiny` uses them too, so nothing here imports `ramify.env`.
"""

import difflib
import random
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import Field

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.splits import RangesConfig, Split, assign_split, draw_distinct

SYSTEM = "Reverse the text character by character. Answer inside <reversed_text> tags."
TAGGED_PATTERN = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
WORDS_FILE = Path(__file__).with_name("words.txt")


class ReversalTextsConfig(RangesConfig):
    """The lengths and the alphabet of the texts. The defaults suit the quickstart."""

    split: Split = "train"
    num_tasks: int = Field(default=1000, ge=1)
    min_chars: int = Field(default=4, ge=1)
    max_chars: int = Field(default=8, ge=1)
    alphabet: str = string.ascii_lowercase + " "
    """The characters of the texts; without the space, words are joined."""
    path: Path | None = None
    """A file with one text per line, used instead of generated texts; lengths and alphabet do not apply to it."""
    seed: int = 0


def generate_texts(config: ReversalTextsConfig) -> Iterator[str]:
    """Yield the distinct texts of the config's split: `num_tasks` of them, or as many as the file has."""
    if config.path is not None:
        lines_of_split = (line for line in _read_lines(config.path) if assign_split(line) == config.split)
        yield from list(dict.fromkeys(lines_of_split))[: config.num_tasks]
        return
    too_few_message = (
        "reverse-text: num_tasks is {count}, but only {found} texts of "
        f"{config.min_chars} to {config.max_chars} characters were found; widen the lengths or the alphabet"
    )
    yield from draw_distinct(_draw_texts(config), config.split, config.num_tasks, str, too_few_message)


def reverse(text: str) -> str:
    """Return the text reversed."""
    return text[::-1]


def wrap_in_tags(text: str) -> str:
    """Return a reply in the form that the system prompt requires."""
    return f"<reversed_text>{text}</reversed_text>"


def extract_tagged(reply: str) -> str:
    """Return the stripped content of the first pair of tags; empty if there is none."""
    match = TAGGED_PATTERN.search(reply)
    return match[1].strip() if match else ""


def score_similarity(reply: str, answer: str) -> float:
    """Return the `difflib` ratio of the tagged text of a reply to the answer."""
    return difflib.SequenceMatcher(None, extract_tagged(reply), answer).ratio()


def score_exact(reply: str, answer: str) -> float:
    """Return 1 if the tagged text of a reply equals the answer, else 0."""
    return float(extract_tagged(reply) == answer)


def is_well_formed(reply: str) -> bool:
    """Return whether the reply is exactly one pair of tags with text between them."""
    return (
        bool(extract_tagged(reply))
        and TAGGED_PATTERN.fullmatch(reply.strip()) is not None
        and reply.count("<reversed_text>") == 1
    )


def _draw_texts(config: ReversalTextsConfig) -> Iterator[str]:
    rng = random.Random(f"reverse-text {config.split} {config.seed}")
    separator = " " if " " in config.alphabet else ""
    usable_words = [
        word for word in load_words() if set(word) <= set(config.alphabet) and len(word) <= config.max_chars
    ]
    if not usable_words:
        raise ConfigInvalid(f"reverse-text: no word can be written with the alphabet {config.alphabet!r}")
    while True:
        min_length = rng.randint(config.min_chars, config.max_chars)
        text = rng.choice(usable_words)
        while len(text) < min_length:
            text += separator + rng.choice(usable_words)
        # A text that is too long counts as an empty draw, so that impossible lengths are detected.
        yield text if config.min_chars <= len(text) <= config.max_chars else ""


def _read_lines(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigInvalid(
            f"taskset.path: {path} cannot be read: {error.strerror}; expected a file with one text per line; without "
            "path, the texts are generated"
        ) from error
    return (line.strip() for line in lines if line.strip())


@cache
def load_words() -> tuple[str, ...]:
    """Return the bundled list of common English words."""
    return tuple(WORDS_FILE.read_text("utf-8").split())
