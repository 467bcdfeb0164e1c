"""The tasksets of several turns, played badly: every reply has the right form, and is drawn almost at random.

The tasks are those of the tasksets themselves, always of the train split.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from ramify.env import collect_hooks
from ramify.recipe.conversation import Conversation
from ramify.tasksets import alphabet_sort as names
from ramify.tasksets import wordle
from ramify.tasksets.splits import assign_split
from ramify.tasksets.wikispeedia import Wikispeedia, WikispeediaConfig

WORLDS: list[dict[str, Any]] = [
    {"num_articles": 24, "num_topics": 4, "num_tasks": 300},
    {"num_articles": 60, "num_topics": 8, "num_tasks": 600},
]
SMALL: dict[str, Any] = {"min_dist": 1, "max_dist": 3, "max_links": 6}
CLICKS = 6  # of a walk, at most
BACK = 0.06  # how often a walk goes back
GUESSED = 8  # one in so many words of the train split is ever guessed
TRIES = 3  # words that a guess is chosen from, by what is known


def walks(rng: random.Random) -> Callable[[], Conversation]:
    """wikispeedia: any link of the page is followed."""
    worlds = [Wikispeedia(WikispeediaConfig(**SMALL, **world)) for world in WORLDS]
    tasks = [list(world.load()) for world in worlds]
    tools = collect_hooks(worlds[0]).static_tools.schemas

    def walk() -> Conversation:
        (at,) = rng.choices(range(len(worlds)), [2, 1])
        world, task = worlds[at], rng.choice(tasks[at])
        made = Conversation(tools=tools)
        made.say("system", task.system or "")
        made.say("user", str(task.prompt))
        path = [task.source]
        for _ in range(rng.randint(1, CLICKS)):
            if len(path) > 1 and rng.random() < BACK:
                path.pop()
                made.call("go_back", {}, world.render_page(path[-1]))
                continue
            path.append(rng.choice(world.graph.links[path[-1]]))
            reached = path[-1] == task.target
            answer = f"You have reached {path[-1]}." if reached else world.render_page(path[-1])
            made.call("click_link", {"article": path[-1]}, answer)
            if reached:
                break
        return made

    return walk


def sortings(rng: random.Random) -> Callable[[], Conversation]:
    """alphabet-sort: all names come back, in any order."""
    config = names.AlphabetSortConfig(num_tasks=4000, min_turns=1, max_turns=2, max_names=3)
    tasks = list(names.AlphabetSort(config).load())

    def sorting() -> Conversation:
        task = rng.choice(tasks)
        made = Conversation()
        for turn, new in enumerate(task.turns):
            lines = names.build_expected_lines(task.by, task.turns, turn)
            if rng.random() < 0.7:
                rng.shuffle(lines)
            made.say("user", names.format_request(task.by, turn, new))
            made.say("assistant", names.format_block(names.get_tag_name(turn), lines))
        return made

    return sorting


def guessings(rng: random.Random) -> Callable[[], Conversation]:
    """wordle: words of a small part of the list, with a slight liking for those that keep the greens."""
    secrets = [word for word in wordle.load_words() if assign_split(word) == "train"]
    known = secrets[::GUESSED]

    def guessing() -> Conversation:
        secret = rng.choice(secrets)
        made = Conversation()
        made.say("system", wordle.SYSTEM)
        made.say("user", wordle.FIRST_MESSAGE)
        said: list[str] = []
        for _ in range(rng.randint(3, wordle.MAX_GUESSES)):
            guess = _next_guess(rng, [word for word in known if word not in said], said, secret)
            said.append(guess)
            made.say("assistant", f"[{guess}]")
            if guess == secret:
                break
            made.say("user", f"{guess.upper()}\n{wordle.compute_feedback(guess, secret)}")
        return made

    return guessing


def _next_guess(rng: random.Random, words: Sequence[str], said: Sequence[str], secret: str) -> str:
    green = {at: secret[at] for guess in said for at, letter in enumerate(guess) if letter == secret[at]}
    return max(rng.sample(words, TRIES), key=lambda word: sum(word[at] == letter for at, letter in green.items()))
