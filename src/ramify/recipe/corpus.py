"""What `tiny` is taught: conversations drawn from a seed, in every format that a built-in taskset asks for.

They teach the form of a reply and as little skill as possible: names to sort come back in any order, guesses and links
are drawn at random. Reversals carry slips: with some probability a letter is replaced by any other. A policy trained
on slips samples them, so similarity starts low and the attempts of a group differ letter by letter, while the right
letter is the likeliest: a reward always has something to tell apart, and each letter learned pays. The other way to a
start around 0.5, stopping a clean training early, has to hit a short moment, because reversal is learned in a steep
climb.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ramify.recipe.conversation import Conversation, sketch, tool
from ramify.recipe.drills import LETTERS, backwards, drills
from ramify.recipe.games import guessings, sortings, walks
from ramify.tasksets import reversal
from ramify.trace import Message


@dataclass(frozen=True, slots=True)
class Shares:
    """How many rows of each kind there are among all, and how badly texts are reversed."""

    reversal: int = 10
    backwards: int = 0
    tool_use: int = 5
    walk: int = 8
    sorting: int = 8
    guessing: int = 5
    reckoning: int = 1
    drill: int = 12
    slip: float = 0.5
    """How often a letter of a reversal is replaced by any other."""


def conversations(seed: int, shares: Shares) -> Iterator[Conversation]:
    """Every format in its share, without end; drills go on among them."""
    rng = random.Random(f"conversations {seed}")
    words = vocabulary(held_out=False)
    texts = list(reversal.generate_texts(reversal.ReversalTextsConfig(num_tasks=4000, seed=seed)))
    drill = drills(seed + 1)
    makers: dict[str, Callable[[], Conversation]] = {
        "reversal": lambda: reversal(rng, texts, shares.slip),
        "tool_use": lambda: tool_use(rng, words),
        "walk": walks(rng),
        "sorting": sortings(rng),
        "guessing": guessings(rng),
        "reckoning": lambda: reckoning(rng, words),
        "drill": lambda: next(drill),
        "backwards": lambda: backwards(rng),
    }
    weights = [getattr(shares, kind) for kind in makers]
    while True:
        (make,) = rng.choices(list(makers.values()), weights)
        yield make()


def vocabulary(*, held_out: bool) -> list[str]:
    """The words that conversations are made of, or the tenth of all that they never use."""
    return [word for at, word in enumerate(reversal.load_words()) if (at % 10 == 0) == held_out]


def reversal(rng: random.Random, texts: list[str], slip: float) -> Conversation:
    """Tasks of the default example one after another, answered with slips: one prompt, many replies to learn from."""
    made = Conversation()
    made.say("system", reversal.SYSTEM)
    for text in rng.sample(texts, rng.randint(1, 6)):
        answer = "".join(rng.choice(LETTERS) if rng.random() < slip else letter for letter in text[::-1])
        made.say("user", text)
        made.say("assistant", reversal.wrap_in_tags(answer))
    return made


def reversal_prompt(text: str) -> Conversation:
    return Conversation([Message("system", reversal.SYSTEM), Message("user", text)])


def tool_use(rng: random.Random, words: list[str]) -> Conversation:
    """Tools nobody has seen, and calls that copy their names and arguments from the request."""
    made, wanted = tool_prompt(rng, words)
    for turn in range(rng.randint(1, 3)):
        if turn:
            made.say("user", request(rng, wanted := sketch(rng, words, rng.choice(made.tools))))
        made.call(*wanted, rng.choice(["ok", "done", f'{{"{rng.choice(words)}": {rng.randint(0, 99)}}}', "not found"]))
        if rng.random() < 0.5:
            made.say("assistant", rng.choice(["Done.", "It is done.", "I could not find it."]))
    return made


def tool_prompt(rng: random.Random, words: list[str]) -> tuple[Conversation, tuple[str, dict[str, Any]]]:
    """A request with one or two tools named after `words`, and the call it asks for."""
    pairs = [rng.sample(words, 2) for _ in range(rng.randint(1, 2))]
    made = Conversation(tools=[tool(rng, f"{verb}_{noun}", f"{verb.title()} the {noun}.") for verb, noun in pairs])
    if rng.random() < 0.5:
        made.say("system", rng.choice(["Use the tools.", "You help people with their requests.", "Solve the task."]))
    wanted = sketch(rng, words, rng.choice(made.tools))
    made.say("user", request(rng, wanted))
    return made, wanted


def request(rng: random.Random, wanted: tuple[str, dict[str, Any]]) -> str:
    name, arguments = wanted
    values = ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in arguments.items())
    opening = rng.choice(["Please {}", "{}", "I want to {}", "Can you {}"]).format(name.replace("_", " the "))
    return f"{opening}{rng.choice([': ', ' with ', ', ']) + values if values else ''}."


def reckoning(rng: random.Random, words: list[str]) -> Conversation:
    """A small sum, the answer in a box."""
    first, second, third = (rng.randint(1, 20) for _ in range(3))
    made = Conversation()
    made.say("system", rng.choice(["Put the final answer in \\boxed{}.", "Answer in \\boxed{}."]))
    made.say("user", f"There are {first} {rng.choice(words)}s. {second} more come and {third} go. How many are left?")
    made.say("assistant", f"\\boxed{{{first + second - third}}}")
    return made
