"""alphabet-sort: turns of names, each scored separately."""

import pytest
from pydantic import ValidationError

from ramify.env.tasksets.alphabet_sort import (
    AlphabetSort,
    AlphabetSortConfig,
    AlphabetSortTask,
    build_expected_lines,
    format_block,
    score_reply,
    sort_key,
)
from tests.support.scripted_agent import get_texts, play

FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
TASK = AlphabetSortTask(by="last", turns=(("BobYang", "AnnZeller"), ("CyAdams",)))
GOLD = [
    "<alphabetical_sorted>\nBobYang\nAnnZeller\n</alphabetical_sorted>",
    "<combined_alphabetical_sorted>\nCyAdams // new name!\nBobYang\nAnnZeller\n</combined_alphabetical_sorted>",
]


async def play_task(*replies: str):
    return await play(AlphabetSort(), TASK, replies)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("AdaReed", "Ada", "Reed"), ("AdaMcReed", "Ada", "McReed"), ("Ada", "Ada", ""), ("adaReed", "ada", "Reed")],
)
def test_name_is_split_at_the_second_capital(name, first, last):
    assert (sort_key(name, "first"), sort_key(name, "last")) == (first, last)


def test_sorting_is_stable():
    turns = [["AnnMoss", "BoReed", "AnnBell"], ["AnnAdler"]]
    assert build_expected_lines("first", turns, 0) == ["AnnMoss", "AnnBell", "BoReed"]
    assert build_expected_lines("first", turns, 1) == ["AnnMoss", "AnnBell", "AnnAdler // new name!", "BoReed"]


def test_only_names_of_the_current_turn_are_marked_new():
    turns = [["CyMoss"], ["BoReed"], ["AnnBell"]]
    assert build_expected_lines("first", turns, 2) == ["AnnBell // new name!", "BoReed", "CyMoss"]


async def test_user_sends_the_names_of_one_turn_after_another():
    requests = get_texts(await play_task(*GOLD, "more?"), "user")
    assert [text.splitlines()[1:] for text in requests] == [["BobYang", "AnnZeller"], ["CyAdams"]]
    assert all("last name" in text for text in requests)
    assert f"<{FIRST_TAG}>" in requests[0]
    assert f"<{LATER_TAG}>" in requests[1]
    assert "// new name!" in requests[1]


async def test_unanswered_turn_scores_zero():
    trace = await play_task(GOLD[0])
    assert (trace.reward, trace.metrics["all_correct"]) == (0.5, 0.0)


async def test_reward_is_the_mean_of_turn_scores():
    close = GOLD[1].replace("BobYang", "BobYaxg")
    similar = 1 - 1 / len("cyadams // new name!\nbobyang\nannzeller")
    assert (await play_task(GOLD[0], close)).reward == pytest.approx((1 + similar**4) / 2)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (format_block(FIRST_TAG, ["AnnMoss", "BoReed"]), 1.0),
        ("Here:\n" + format_block(FIRST_TAG, ["  annmoss ", "", "BOREED"]) + "\nDone.", 1.0),
        ("AnnMoss\nBoReed", 0.0),
        (f"<{FIRST_TAG}>\nAnnMoss\nBoReed", 0.0),
        (format_block(LATER_TAG, ["AnnMoss", "BoReed"]), 0.0),
        (format_block(FIRST_TAG, []), 0.0),
        ("", 0.0),
    ],
)
def test_lines_in_tags_are_compared_without_case_and_spaces(reply, value):
    assert score_reply(reply, FIRST_TAG, ["AnnMoss", "BoReed"]) == value


def test_several_blocks_score_only_if_each_improves():
    lines = ["AnnMoss", "BoReed"]
    good, worse, bad = (
        format_block(FIRST_TAG, lines),
        format_block(FIRST_TAG, ["AnnMoss", "BoRxxx"]),
        format_block(FIRST_TAG, ["x"]),
    )
    assert score_reply(worse + good, FIRST_TAG, lines) == 1.0
    assert score_reply(bad + worse + good, FIRST_TAG, lines) == 1.0
    assert 0 < score_reply(bad + worse, FIRST_TAG, lines) < 1
    assert score_reply(good + good, FIRST_TAG, lines) == 0.0
    assert score_reply(good + worse, FIRST_TAG, lines) == 0.0
    assert score_reply(worse + bad + good, FIRST_TAG, lines) == 0.0


def test_turns_and_names_follow_the_config():
    config = AlphabetSortConfig(min_turns=2, max_turns=4, min_names=2, max_names=3, num_tasks=100)
    tasks = list(AlphabetSort(config).load())
    assert {len(task.turns) for task in tasks} == {2, 3, 4}
    assert {len(names) for task in tasks for names in task.turns} == {2, 3}
    assert {task.by for task in tasks} == {"first", "last"}
    assert all(len(set(sum(task.turns, ()))) == sum(map(len, task.turns)) for task in tasks)


@pytest.mark.parametrize("settings", [{"min_turns": 4}, {"min_names": 6}, {"max_turns": 0}, {"names": 3}])
def test_impossible_sizes_are_refused(settings):
    with pytest.raises(ValidationError):
        AlphabetSortConfig(**settings)
