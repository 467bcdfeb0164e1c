"""The rollouts both sides of a comparison record: seeded, made of the standard library only, the same everywhere.

A turn is one user message of 1000 ASCII characters that adds 250 tokens to the prompt, and one reply of 1000 characters
with 250 sampled tokens and their logprobs: 500 tokens a turn, 1 kB messages. The prompt of a turn is every token before
it on its path plus the 250 new ones. Logprobs are float32 values, so a library that keeps 32 bits loses nothing.

Tokens are `array("i")` (four bytes each): numpy views them without a copy, `tolist()` gives fresh Python integers, like
a decoded engine reply. Each side converts to the type it declares, outside of the time it measures.
"""

from __future__ import annotations

import hashlib
import random
import string
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = 50_000
MESSAGE_TOKENS = 250
MESSAGE_CHARACTERS = 1000
ALPHABET = string.ascii_letters + string.digits + " .,\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what it was asked, what it answered, and the turn it continues."""

    parent: int
    """Index of the turn this one continues, -1 for the first."""
    user: str
    reply: str
    added: array[int]
    """The tokens the user message adds to the prompt."""
    sampled: array[int]
    logprobs: array[float]
    """One float32 a sampled token."""


def chain(turns: int, seed: int = 0) -> list[Turn]:
    """A conversation of `turns` turns without a fork."""
    rng = random.Random(seed)
    return [_turn(rng, parent) for parent in range(-1, turns - 1)]


def tree(depth: int = 6, seed: int = 0) -> list[Turn]:
    """One shared first turn, then two different turns after every turn: 2**depth leaves, parents before children."""
    rng = random.Random(seed)
    return [_turn(rng, (index + 1) // 2 - 1) for index in range(2 ** (depth + 1) - 1)]


def path(turns: Sequence[Turn], index: int) -> list[int]:
    """The turns from the first one to `index`."""
    indices: list[int] = []
    while index >= 0:
        indices.append(index)
        index = turns[index].parent
    return indices[::-1]


def prompt(turns: Sequence[Turn], index: int) -> array[int]:
    """The token ids the engine saw before it sampled turn `index`."""
    ids = array("i")
    for before in path(turns, index)[:-1]:
        ids += turns[before].added
        ids += turns[before].sampled
    return ids + turns[index].added


def digest(turns: Sequence[Turn]) -> str:
    """Equal on both sides exactly when both recorded the same data."""
    sha = hashlib.sha256()
    for turn in turns:
        sha.update(f"{turn.parent}|{turn.user}|{turn.reply}|".encode())
        for values in (turn.added, turn.sampled, turn.logprobs):
            sha.update(values.tobytes())
    return sha.hexdigest()


def _turn(rng: random.Random, parent: int) -> Turn:
    return Turn(
        parent=parent,
        user=_text(rng),
        reply=_text(rng),
        added=_tokens(rng),
        sampled=_tokens(rng),
        logprobs=array("f", (-rng.expovariate(2.0) for _ in range(MESSAGE_TOKENS))),
    )


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=MESSAGE_CHARACTERS))


def _tokens(rng: random.Random) -> array[int]:
    return array("i", rng.choices(range(VOCABULARY), k=MESSAGE_TOKENS))
