"""Drills: short rows of random letters, to be reversed, repeated, picked, clicked or called.

They are where attention learns to find a character and to go on from it. Conversations alone did not get there in four
times the steps: most of each row is prompt, and English words can be guessed without looking.
"""

import random
from collections.abc import Iterator

from ramify.env.tasksets.reversal import wrap_in_tags
from tools.tiny.conversation import DrillConversation, draw_tool_call, make_tool

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_TURNS = 5  # at most, so that a row is mostly replies


def draw_drills(seed: int) -> Iterator[DrillConversation]:
    """One drill after another, without end."""
    rng = random.Random(f"drills {seed}")
    while True:
        (drill,) = rng.choices(
            [draw_reversal_drill, _draw_copy_drill, _draw_pick_drill, _draw_click_drill, _draw_call_drill],
            [4, 3, 3, 3, 3],
        )
        yield drill(rng)


def random_string(rng: random.Random) -> str:
    """A few random letters, often with a capital, sometimes with a second one further on."""
    parts = ["".join(rng.choices(LETTERS, k=rng.randint(2, 6))) for _ in range(rng.choice([1, 1, 2]))]
    return "".join(part.capitalize() for part in parts) if rng.random() < 0.6 else "".join(parts)


def random_strings(rng: random.Random, max_count: int = 6) -> list[str]:
    """Draw 1 to `max_count` random strings."""
    return [random_string(rng) for _ in range(rng.randint(1, max_count))]


def draw_reversal_drill(rng: random.Random) -> DrillConversation:
    """Random letters, reversed without a slip."""
    conversation = DrillConversation()
    for _ in range(rng.randint(1, MAX_TURNS)):
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 9)))
        conversation.add_message("user", text)
        conversation.add_message("assistant", wrap_in_tags(text[::-1]))
    return conversation


def _draw_copy_drill(rng: random.Random) -> DrillConversation:
    conversation = DrillConversation()
    for _ in range(rng.randint(1, 3)):
        lines = "\n".join(random_strings(rng, 4))
        conversation.add_message("user", lines)
        conversation.add_message("assistant", lines)
    return conversation


def _draw_pick_drill(rng: random.Random) -> DrillConversation:
    conversation = DrillConversation()
    for _ in range(rng.randint(1, MAX_TURNS)):
        lines = random_strings(rng)
        conversation.add_message("user", "\n".join(lines))
        conversation.add_message("assistant", f"[{rng.choice(lines)}]")
    return conversation


def _draw_click_drill(rng: random.Random) -> DrillConversation:
    conversation = DrillConversation()
    links = random_strings(rng)
    conversation.add_message("user", format_page(random_string(rng), links))
    for _ in range(rng.randint(1, MAX_TURNS)):
        title, links = rng.choice(links), random_strings(rng)
        conversation.add_tool_call("click_link", {"article": title}, format_page(title, links))
    return conversation


def _draw_call_drill(rng: random.Random) -> DrillConversation:
    conversation = DrillConversation(tools=[make_tool(rng, random_string(rng)) for _ in range(rng.randint(1, 3))])
    for _ in range(rng.randint(1, MAX_TURNS)):
        name, arguments = draw_tool_call(rng, random_strings(rng), rng.choice(conversation.tools))
        conversation.add_message("user", " ".join([name, *map(str, arguments.values())]))
        conversation.add_tool_call(name, arguments, "ok")
    return conversation


def format_page(title: str, links: list[str]) -> str:
    """A page as wikispeedia shows it."""
    return "\n".join([title, "Links:", *links])
