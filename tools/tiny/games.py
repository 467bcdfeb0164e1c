"""The tasksets of several turns, played badly: every reply has the right form, and is drawn almost at random.

The tasks come from the tasksets themselves, always from the train split.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from ramify.env import collect_hooks
from ramify.env.tasksets import alphabet_sort, wordle
from ramify.env.tasksets.splits import assign_split
from ramify.env.tasksets.wikispeedia import Wikispeedia, WikispeediaConfig
from tools.tiny.conversation import DrillConversation

GRAPH_SIZES: list[dict[str, Any]] = [
    {"num_articles": 24, "num_topics": 4, "num_tasks": 300},
    {"num_articles": 60, "num_topics": 8, "num_tasks": 600},
]
SMALL_GRAPH: dict[str, Any] = {"min_dist": 1, "max_dist": 3, "max_links": 6}
MAX_CLICKS = 6  # of a walk, at most
GO_BACK_PROB = 0.06  # how often a walk goes back
GUESS_WORD_STRIDE = 8  # one in so many words of the train split is ever guessed
GUESS_CANDIDATES = 3  # words that a guess is chosen from, by what is known


def make_walk_generator(rng: random.Random) -> Callable[[], DrillConversation]:
    """wikispeedia: any link of the page is followed."""
    worlds = [Wikispeedia(WikispeediaConfig(**SMALL_GRAPH, **world)) for world in GRAPH_SIZES]
    tasks = [list(world.load()) for world in worlds]
    tools = collect_hooks(worlds[0]).static_tools.schemas

    def walk() -> DrillConversation:
        (index,) = rng.choices(range(len(worlds)), [2, 1])
        world, task = worlds[index], rng.choice(tasks[index])
        conversation = DrillConversation(tools=tools)
        conversation.add_message("system", task.system or "")
        conversation.add_message("user", str(task.prompt))
        path = [task.source]
        for _ in range(rng.randint(1, MAX_CLICKS)):
            if len(path) > 1 and rng.random() < GO_BACK_PROB:
                path.pop()
                conversation.add_tool_call("go_back", {}, world.render_page(path[-1]))
                continue
            path.append(rng.choice(world.graph.links[path[-1]]))
            reached = path[-1] == task.target
            answer = f"You have reached {path[-1]}." if reached else world.render_page(path[-1])
            conversation.add_tool_call("click_link", {"article": path[-1]}, answer)
            if reached:
                break
        return conversation

    return walk


def make_sorting_generator(rng: random.Random) -> Callable[[], DrillConversation]:
    """alphabet-sort: all names come back, in any order."""
    config = alphabet_sort.AlphabetSortConfig(num_tasks=4000, min_turns=1, max_turns=2, max_names=3)
    tasks = list(alphabet_sort.AlphabetSort(config).load())

    def sorting() -> DrillConversation:
        task = rng.choice(tasks)
        conversation = DrillConversation()
        for turn, new in enumerate(task.turns):
            lines = alphabet_sort.build_expected_lines(task.by, task.turns, turn)
            if rng.random() < 0.7:
                rng.shuffle(lines)
            conversation.add_message("user", alphabet_sort.format_request(task.by, turn, new))
            conversation.add_message("assistant", alphabet_sort.format_block(alphabet_sort.get_tag_name(turn), lines))
        return conversation

    return sorting


def make_guessing_generator(rng: random.Random) -> Callable[[], DrillConversation]:
    """wordle: words of a small part of the list, with a slight liking for those that keep the greens."""
    secrets = [word for word in wordle.load_words() if assign_split(word) == "train"]
    guessable_words = secrets[::GUESS_WORD_STRIDE]

    def guessing() -> DrillConversation:
        secret = rng.choice(secrets)
        conversation = DrillConversation()
        conversation.add_message("system", wordle.SYSTEM)
        conversation.add_message("user", wordle.FIRST_MESSAGE)
        guesses: list[str] = []
        for _ in range(rng.randint(3, wordle.MAX_GUESSES)):
            guess = _choose_guess(rng, [word for word in guessable_words if word not in guesses], guesses, secret)
            guesses.append(guess)
            conversation.add_message("assistant", f"[{guess}]")
            if guess == secret:
                break
            conversation.add_message("user", f"{guess.upper()}\n{wordle.compute_feedback(guess, secret)}")
        return conversation

    return guessing


def _choose_guess(rng: random.Random, words: Sequence[str], guesses: Sequence[str], secret: str) -> str:
    green = {at: secret[at] for guess in guesses for at, letter in enumerate(guess) if letter == secret[at]}
    return max(
        rng.sample(words, GUESS_CANDIDATES), key=lambda word: sum(word[at] == letter for at, letter in green.items())
    )
