"""Drills: short rows of random letters, to be reversed, repeated, picked, clicked or called.

They are where attention learns to find a character and to go on from it. Conversations alone did not get there in four
times the steps: most of each row is prompt, and English words can be guessed without looking.
"""

import random
from collections.abc import Iterator

from ramify.recipe.conversation import Conversation, sketch, tool
from ramify.tasksets.reversal import wrap_in_tags

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TURNS = 5  # at most, so that a row is mostly replies


def drills(seed: int) -> Iterator[Conversation]:
    """One drill after another, without end."""
    rng = random.Random(f"drills {seed}")
    while True:
        (drill,) = rng.choices([backwards, _repeat, _pick, _click, _call], [4, 3, 3, 3, 3])
        yield drill(rng)


def scrap(rng: random.Random) -> str:
    """A few random letters, often with a capital, sometimes with a second one further on."""
    parts = ["".join(rng.choices(LETTERS, k=rng.randint(2, 6))) for _ in range(rng.choice([1, 1, 2]))]
    return "".join(part.capitalize() for part in parts) if rng.random() < 0.6 else "".join(parts)


def scraps(rng: random.Random, most: int = 6) -> list[str]:
    return [scrap(rng) for _ in range(rng.randint(1, most))]


def backwards(rng: random.Random) -> Conversation:
    """Random letters, reversed without a slip."""
    made = Conversation()
    for _ in range(rng.randint(1, TURNS)):
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 9)))
        made.say("user", text)
        made.say("assistant", wrap_in_tags(text[::-1]))
    return made


def _repeat(rng: random.Random) -> Conversation:
    made = Conversation()
    for _ in range(rng.randint(1, 3)):
        lines = "\n".join(scraps(rng, 4))
        made.say("user", lines)
        made.say("assistant", lines)
    return made


def _pick(rng: random.Random) -> Conversation:
    made = Conversation()
    for _ in range(rng.randint(1, TURNS)):
        lines = scraps(rng)
        made.say("user", "\n".join(lines))
        made.say("assistant", f"[{rng.choice(lines)}]")
    return made


def _click(rng: random.Random) -> Conversation:
    made = Conversation()
    links = scraps(rng)
    made.say("user", page(scrap(rng), links))
    for _ in range(rng.randint(1, TURNS)):
        title, links = rng.choice(links), scraps(rng)
        made.call("click_link", {"article": title}, page(title, links))
    return made


def _call(rng: random.Random) -> Conversation:
    made = Conversation(tools=[tool(rng, scrap(rng)) for _ in range(rng.randint(1, 3))])
    for _ in range(rng.randint(1, TURNS)):
        name, arguments = sketch(rng, scraps(rng), rng.choice(made.tools))
        made.say("user", " ".join([name, *map(str, arguments.values())]))
        made.call(name, arguments, "ok")
    return made


def page(title: str, links: list[str]) -> str:
    """A page as wikispeedia shows it."""
    return "\n".join([title, "Links:", *links])
