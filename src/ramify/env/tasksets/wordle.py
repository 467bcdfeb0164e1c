"""wordle: find a five-letter word in six guesses, with feedback on the letters after each guess.

The game is a function of the replies. The user that gives the feedback, the reward and a replay of a saved trace all
compute it from the start, so they cannot disagree.
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
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.answers import get_replies
from ramify.env.tasksets.splits import assign_split

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
    """The choice of secret words."""

    num_tasks: int | None = Field(default=None, ge=1)
    """Number of secrets. Default: every word of the split."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WordleGame:
    """The state of a game after some replies. It ends with the secret, six guesses, or two invalid guesses in a row."""

    guesses: tuple[str, ...] = ()  # the valid ones
    marks: str = ""  # of the latest valid guess
    problem: str = ""  # why the latest reply is invalid, if it is
    is_over: bool = False

    @property
    def score(self) -> float:
        """1 for the secret; else 0.2 for each green and 0.1 for each yellow letter of the latest valid guess."""
        return (self.marks.count("G") + 0.5 * self.marks.count("Y")) / WORD_LENGTH


class WordleUser(rf.User):
    """Answers each guess with its marks."""

    def respond(self, task: rf.Task, trace: rf.Trace) -> str | None:
        """Return the feedback to the last guess; end the conversation when the game is over."""
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
        """Yield one task per secret word of the split, in an order set by the seed."""
        config = self.config
        secrets = [word for word in load_words() if assign_split(word) == config.split]
        random.Random(f"wordle {config.split} {config.seed}").shuffle(secrets)
        if config.num_tasks is not None and config.num_tasks > len(secrets):
            raise ConfigInvalid(f"wordle: num_tasks is {config.num_tasks}, but {config.split} has {len(secrets)} words")
        for secret in secrets[: config.num_tasks]:
            yield rf.Task(prompt=FIRST_MESSAGE, system=SYSTEM, answer=secret)

    def user(self) -> rf.User:
        """Return the user, who answers each guess with feedback."""
        return WordleUser()

    @rf.reward
    def found(self, task: rf.Task, trace: rf.Trace) -> float:
        """1 for the secret, else a partial score for the letters of the latest valid guess."""
        return play_replies(task.answer, get_replies(trace)).score

    @rf.metric
    def guesses(self, task: rf.Task, trace: rf.Trace) -> float:
        """The number of valid guesses."""
        return float(len(play_replies(task.answer, get_replies(trace)).guesses))

    def gold(self, task: rf.Task) -> list[str]:
        """Return a guess of the secret word."""
        return [f"[{task.answer}]"]


def play_replies(secret: str, replies: Sequence[str]) -> WordleGame:
    """Return the game after these replies. Replies after its end are ignored."""
    game = WordleGame()
    for reply in replies:
        if game.is_over:
            break
        game = _apply_reply(game, secret, reply)
    return game


def compute_feedback(guess: str, secret: str) -> str:
    """Return G, Y or X for each letter. A letter is marked at most as often as the secret has it, greens first."""
    unmatched = Counter(expected for letter, expected in zip(guess, secret) if letter != expected)
    marks: list[str] = []
    for letter, expected in zip(guess, secret):
        if letter == expected:
            marks.append("G")
        elif unmatched[letter]:
            unmatched[letter] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


def parse_guess(reply: str) -> str | None:
    """Return the first word in brackets, in lower case; None if there is none."""
    match = GUESS_PATTERN.search(reply)
    return match[1].lower() if match else None


@cache
def load_words() -> dict[str, None]:
    """Return the bundled words as an ordered set: all allowed guesses, and all secrets."""
    return dict.fromkeys(WORDS_FILE.read_text("utf-8").split())


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
    if guess not in load_words():
        return f"{guess} is not in the word list."
    return f"{guess} was guessed before." if guess in previous_guesses else ""
