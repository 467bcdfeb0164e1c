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
from ramify.tasksets.answers import get_replies
from ramify.tasksets.splits import assign_split

WORDS_FILE = Path(__file__).with_name("five_letters.txt")
GUESS_PATTERN = re.compile(r"\[([A-Za-z]+)\]")
MAX_GUESSES = 6
WORD_LENGTH = 5
SYSTEM = (
    f"Play Wordle: find the five-letter word in {MAX_GUESSES} guesses. Guess as [word]. "
    "Each letter is answered by G (right place), Y (other place) or X (not in the word)."
)
FIRST_MESSAGE = "Your first guess?"


class WordleConfig(rf.TasksetConfig):
    """Which secrets are played."""

    num_tasks: int | None = Field(default=None, ge=1)
    """How many secrets; without it, every word of the split."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WordleGame:
    """What has happened so far.

    PLAYING -> WON (the secret) | LOST (six guesses, or two invalid ones in a row)
    """

    guesses: tuple[str, ...] = ()  # the valid ones
    marks: str = ""  # of the latest valid guess
    problem: str = ""  # what is wrong with the latest reply, if it was invalid
    is_over: bool = False

    @property
    def is_won(self) -> bool:
        return self.marks == "G" * WORD_LENGTH

    @property
    def score(self) -> float:
        """1 for a win, else what the latest valid guess was worth."""
        return (self.marks.count("G") + 0.5 * self.marks.count("Y")) / WORD_LENGTH


class WordleUser(rf.User):
    """Marks each guess."""

    def respond(self, task: rf.Task, trace: rf.Trace) -> str | None:
        game = play_replies(task.answer, get_replies(trace))
        if game.is_over:
            return None
        if game.problem:
            return f"{game.problem} A second invalid guess in a row ends the game."
        return f"{game.guesses[-1].upper()}\n{game.marks}"


class Wordle(rf.Taskset):
    """Guess a five-letter word from coloured hints."""

    config: WordleConfig

    def load(self) -> Iterator[rf.Task]:
        config = self.config
        secrets = [word for word in load_words() if assign_split(word) == config.split]
        random.Random(f"wordle {config.split} {config.seed}").shuffle(secrets)
        if config.num_tasks is not None and config.num_tasks > len(secrets):
            raise ConfigInvalid(f"wordle: num_tasks is {config.num_tasks}, but {config.split} has {len(secrets)} words")
        for secret in secrets[: config.num_tasks]:
            yield rf.Task(prompt=FIRST_MESSAGE, system=SYSTEM, answer=secret)

    def user(self) -> rf.User:
        return WordleUser()

    @rf.reward
    def found(self, task: rf.Task, trace: rf.Trace) -> float:
        """1 for the word, else a part of it for the letters of the latest valid guess."""
        return play_replies(task.answer, get_replies(trace)).score

    @rf.metric
    def guesses(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(len(play_replies(task.answer, get_replies(trace)).guesses))

    def gold(self, task: rf.Task) -> list[str]:
        return [f"[{task.answer}]"]


def play_replies(secret: str, replies: Sequence[str]) -> WordleGame:
    """The game after these replies; those that come after its end change nothing."""
    game = WordleGame()
    for reply in replies:
        if game.is_over:
            break
        game = _apply_reply(game, secret, reply)
    return game


def compute_feedback(guess: str, secret: str) -> str:
    """G, Y or X for each letter. A letter is marked at most as often as the secret has it, greens first."""
    unmatched = Counter(wanted for letter, wanted in zip(guess, secret) if letter != wanted)
    marks: list[str] = []
    for letter, wanted in zip(guess, secret):
        if letter == wanted:
            marks.append("G")
        elif unmatched[letter]:
            unmatched[letter] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


def parse_guess(reply: str) -> str | None:
    """The first word in brackets, in lower case."""
    match = GUESS_PATTERN.search(reply)
    return match[1].lower() if match else None


@cache
def load_words() -> tuple[str, ...]:
    """The bundled list: every word that may be guessed, and every secret."""
    return tuple(WORDS_FILE.read_text("utf-8").split())


def _apply_reply(game: WordleGame, secret: str, reply: str) -> WordleGame:
    guess = parse_guess(reply)
    problem = _find_problem(guess, game.guesses)
    if guess is None or problem:
        return WordleGame(game.guesses, game.marks, problem, is_over=bool(game.problem))
    guesses = (*game.guesses, guess)
    return WordleGame(guesses, compute_feedback(guess, secret), is_over=guess == secret or len(guesses) == MAX_GUESSES)


def _find_problem(guess: str | None, previous_guesses: Sequence[str]) -> str:
    if guess is None:
        return "Write your guess in brackets: [word]."
    if len(guess) != WORD_LENGTH:
        return f"{guess} has {len(guess)} letters, not {WORD_LENGTH}."
    if guess not in _load_word_set():
        return f"{guess} is not in the word list."
    return f"{guess} was guessed before." if guess in previous_guesses else ""


@cache
def _load_word_set() -> frozenset[str]:
    return frozenset(load_words())
