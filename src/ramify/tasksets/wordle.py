"""wordle: find a five-letter word in six guesses, told after each which letters are right.

The game is a function of the replies. The user that gives the feedback, the reward and a replay of a saved trace all
play it again from the start, so they cannot disagree about what happened.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

import ramify as rf
from ramify.errors import ConfigInvalid
from ramify.tasksets.drawing import split_of
from ramify.tasksets.reading import replies

WORDS = Path(__file__).with_name("five_letters.txt")
GUESS = re.compile(r"\[([A-Za-z]+)\]")
GUESSES = 6
LENGTH = 5
SYSTEM = (
    f"Play Wordle: find the five-letter word in {GUESSES} guesses. Guess as [word]. "
    "Each letter is answered by G (right place), Y (other place) or X (not in the word)."
)
OPENING = "Your first guess?"


class WordleConfig(rf.TasksetConfig):
    """Which secrets are played."""

    num_tasks: int | None = Field(default=None, ge=1)
    """How many secrets; without it, every word of the split."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Game:
    """What has happened so far.

    PLAYING -> WON (the secret) | LOST (six guesses, or two invalid ones in a row)
    """

    guesses: tuple[str, ...] = ()  # the valid ones
    marks: str = ""  # of the latest valid guess
    problem: str = ""  # what is wrong with the latest reply, if it was invalid
    over: bool = False

    @property
    def won(self) -> bool:
        return self.marks == "G" * LENGTH

    @property
    def score(self) -> float:
        """1 for a win, else what the latest valid guess was worth."""
        return (self.marks.count("G") + 0.5 * self.marks.count("Y")) / LENGTH


class Host(rf.User):
    """Marks each guess."""

    def respond(self, task: rf.Task, trace: rf.Trace) -> str | None:
        game = play(task.answer, replies(trace))
        if game.over:
            return None
        if game.problem:
            return f"{game.problem} A second invalid guess in a row ends the game."
        return f"{game.guesses[-1].upper()}\n{game.marks}"


class Wordle(rf.Taskset):
    """Guess a five-letter word from coloured hints."""

    config: WordleConfig

    def load(self) -> Iterator[rf.Task]:
        config = self.config
        secrets = [word for word in words() if split_of(word) == config.split]
        random.Random(f"wordle {config.split} {config.seed}").shuffle(secrets)
        if config.num_tasks is not None and config.num_tasks > len(secrets):
            raise ConfigInvalid(f"wordle: num_tasks is {config.num_tasks}, but {config.split} has {len(secrets)} words")
        for secret in secrets[: config.num_tasks]:
            yield rf.Task(prompt=OPENING, system=SYSTEM, answer=secret)

    def user(self) -> rf.User:
        return Host()

    @rf.reward
    def found(self, task: rf.Task, trace: rf.Trace) -> float:
        """1 for the word, else a part of it for the letters of the latest valid guess."""
        return play(task.answer, replies(trace)).score

    @rf.metric
    def guesses(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(len(play(task.answer, replies(trace)).guesses))

    def gold(self, task: rf.Task) -> list[str]:
        return [f"[{task.answer}]"]


def play(secret: str, replies: Sequence[str]) -> Game:
    """The game after these replies; those that come after its end change nothing."""
    game = Game()
    for reply in replies:
        if game.over:
            break
        game = _turn(game, secret, reply)
    return game


def feedback(guess: str, secret: str) -> str:
    """G, Y or X for each letter. A letter is marked at most as often as the secret has it, greens first."""
    left = Counter(wanted for letter, wanted in zip(guess, secret) if letter != wanted)
    marks: list[str] = []
    for letter, wanted in zip(guess, secret):
        if letter == wanted:
            marks.append("G")
        elif left[letter]:
            left[letter] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


def guess_of(reply: str) -> str | None:
    """The first word in brackets, in lower case."""
    found = GUESS.search(reply)
    return found[1].lower() if found else None


@cache
def words() -> tuple[str, ...]:
    """The bundled list: every word that may be guessed, and every secret."""
    return tuple(WORDS.read_text("utf-8").split())


def _turn(game: Game, secret: str, reply: str) -> Game:
    guess = guess_of(reply)
    problem = _problem(guess, game.guesses)
    if guess is None or problem:
        return Game(game.guesses, game.marks, problem, over=bool(game.problem))
    guesses = (*game.guesses, guess)
    return Game(guesses, feedback(guess, secret), over=guess == secret or len(guesses) == GUESSES)


def _problem(guess: str | None, before: Sequence[str]) -> str:
    if guess is None:
        return "Write your guess in brackets: [word]."
    if len(guess) != LENGTH:
        return f"{guess} has {len(guess)} letters, not {LENGTH}."
    if guess not in _known():
        return f"{guess} is not in the word list."
    return f"{guess} was guessed before." if guess in before else ""


@cache
def _known() -> frozenset[str]:
    return frozenset(words())
