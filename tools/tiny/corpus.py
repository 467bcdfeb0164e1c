"""The training conversations of `tiny`, drawn from a seed, in every format that a built-in taskset uses.

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

from ramify.env.tasksets import reversal
from ramify.trace import Message
from tools.tiny.conversation import DrillConversation, draw_tool_call, make_tool
from tools.tiny.drills import LETTERS, draw_drills, draw_reversal_drill
from tools.tiny.games import make_guessing_generator, make_sorting_generator, make_walk_generator


@dataclass(frozen=True, slots=True)
class CorpusMix:
    """How many rows of each kind there are among all, and how badly texts are reversed."""

    reversal: int = 10
    reversal_drill: int = 0
    tool_use: int = 5
    walk: int = 8
    sorting: int = 8
    guessing: int = 5
    arithmetic: int = 1
    drill: int = 12
    slip_prob: float = 0.5
    """How often a letter of a reversal is replaced by any other."""


def draw_conversations(seed: int, mix: CorpusMix) -> Iterator[DrillConversation]:
    """Every format in its share, without end; drills go on among them."""
    rng = random.Random(f"conversations {seed}")
    words = load_vocabulary(held_out=False)
    texts = list(reversal.generate_texts(reversal.ReversalTextsConfig(num_tasks=4000, seed=seed)))
    drill = draw_drills(seed + 1)
    makers: dict[str, Callable[[], DrillConversation]] = {
        "reversal": lambda: draw_reversal(rng, texts, mix.slip_prob),
        "tool_use": lambda: draw_tool_use(rng, words),
        "walk": make_walk_generator(rng),
        "sorting": make_sorting_generator(rng),
        "guessing": make_guessing_generator(rng),
        "arithmetic": lambda: draw_arithmetic(rng, words),
        "drill": lambda: next(drill),
        "reversal_drill": lambda: draw_reversal_drill(rng),
    }
    weights = [getattr(mix, kind) for kind in makers]
    while True:
        (make,) = rng.choices(list(makers.values()), weights)
        yield make()


def load_vocabulary(*, held_out: bool) -> list[str]:
    """The words that conversations are made of, or the tenth of all that they never use."""
    return [word for index, word in enumerate(reversal.load_words()) if (index % 10 == 0) == held_out]


def draw_reversal(rng: random.Random, texts: list[str], slip_prob: float) -> DrillConversation:
    """Tasks of the default example one after another, answered with slips: one prompt, many replies to learn from."""
    conversation = DrillConversation()
    conversation.add_message("system", reversal.SYSTEM)
    for text in rng.sample(texts, rng.randint(1, 6)):
        answer = "".join(rng.choice(LETTERS) if rng.random() < slip_prob else letter for letter in text[::-1])
        conversation.add_message("user", text)
        conversation.add_message("assistant", reversal.wrap_in_tags(answer))
    return conversation


def build_reversal_prompt(text: str) -> DrillConversation:
    """Return the prompt of a reverse-text task."""
    return DrillConversation([Message("system", reversal.SYSTEM), Message("user", text)])


def draw_tool_use(rng: random.Random, words: list[str]) -> DrillConversation:
    """Tools nobody has seen, and calls that copy their names and arguments from the request."""
    conversation, expected_call = draw_tool_prompt(rng, words)
    for turn in range(rng.randint(1, 3)):
        if turn:
            conversation.add_message(
                "user", format_request(rng, expected_call := draw_tool_call(rng, words, rng.choice(conversation.tools)))
            )
        conversation.add_tool_call(
            *expected_call, rng.choice(["ok", "done", f'{{"{rng.choice(words)}": {rng.randint(0, 99)}}}', "not found"])
        )
        if rng.random() < 0.5:
            conversation.add_message("assistant", rng.choice(["Done.", "It is done.", "I could not find it."]))
    return conversation


def draw_tool_prompt(rng: random.Random, words: list[str]) -> tuple[DrillConversation, tuple[str, dict[str, Any]]]:
    """A request with one or two tools named after `words`, and the call it asks for."""
    pairs = [rng.sample(words, 2) for _ in range(rng.randint(1, 2))]
    conversation = DrillConversation(
        tools=[make_tool(rng, f"{verb}_{noun}", f"{verb.title()} the {noun}.") for verb, noun in pairs]
    )
    if rng.random() < 0.5:
        conversation.add_message(
            "system", rng.choice(["Use the tools.", "You help people with their requests.", "Solve the task."])
        )
    expected_call = draw_tool_call(rng, words, rng.choice(conversation.tools))
    conversation.add_message("user", format_request(rng, expected_call))
    return conversation, expected_call


def format_request(rng: random.Random, expected_call: tuple[str, dict[str, Any]]) -> str:
    """Return a request of a user that the expected call answers."""
    name, arguments = expected_call
    values = ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in arguments.items())
    opening = rng.choice(["Please {}", "{}", "I want to {}", "Can you {}"]).format(name.replace("_", " the "))
    return f"{opening}{rng.choice([': ', ' with ', ', ']) + values if values else ''}."


def draw_arithmetic(rng: random.Random, words: list[str]) -> DrillConversation:
    """A small sum with a boxed answer."""
    first, second, third = (rng.randint(1, 20) for _ in range(3))
    conversation = DrillConversation()
    conversation.add_message("system", rng.choice(["Put the final answer in \\boxed{}.", "Answer in \\boxed{}."]))
    conversation.add_message(
        "user", f"There are {first} {rng.choice(words)}s. {second} more come and {third} go. How many are left?"
    )
    conversation.add_message("assistant", f"\\boxed{{{first + second - third}}}")
    return conversation
