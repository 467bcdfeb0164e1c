"""alphabet-sort: turns of names, each scored on its own."""

import pytest
from pydantic import ValidationError

from ramify.tasksets.alphabet_sort import (
    AlphabetSort,
    AlphabetSortConfig,
    AlphabetSortTask,
    build_expected_lines,
    format_block,
    score_reply,
    sort_key,
)
from ramify.tasksets.person_names import load_names
from tests.tasksets.playing import play, said

FIRST, LATER = "alphabetical_sorted", "combined_alphabetical_sorted"
TASK = AlphabetSortTask(by="last", turns=(("BobYang", "AnnZeller"), ("CyAdams",)))
RIGHT = [
    "<alphabetical_sorted>\nBobYang\nAnnZeller\n</alphabetical_sorted>",
    "<combined_alphabetical_sorted>\nCyAdams // new name!\nBobYang\nAnnZeller\n</combined_alphabetical_sorted>",
]


def played(*replies: str):
    return play(AlphabetSort(), TASK, replies)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("AdaReed", "Ada", "Reed"), ("AdaMcReed", "Ada", "McReed"), ("Ada", "Ada", ""), ("adaReed", "ada", "Reed")],
)
def test_a_name_splits_at_the_first_capital_after_its_first_letter(name, first, last):
    assert (sort_key(name, "first"), sort_key(name, "last")) == (first, last)


def test_equal_keys_keep_their_order():
    turns = [["AnnMoss", "BoReed", "AnnBell"], ["AnnAdler"]]
    assert build_expected_lines("first", turns, 0) == ["AnnMoss", "AnnBell", "BoReed"]
    assert build_expected_lines("first", turns, 1) == ["AnnMoss", "AnnBell", "AnnAdler // new name!", "BoReed"]


def test_only_the_names_of_this_turn_are_new():
    turns = [["CyMoss"], ["BoReed"], ["AnnBell"]]
    assert build_expected_lines("first", turns, 2) == ["AnnBell // new name!", "BoReed", "CyMoss"]


def test_a_perfect_conversation_scores_one():
    trace = played(*RIGHT)
    assert (trace.reward, trace.metrics) == (1.0, {"all_correct": 1.0})


def test_the_user_opens_and_brings_one_turn_after_another():
    asked = said(played(*RIGHT, "more?"), "user")
    assert [text.splitlines()[1:] for text in asked] == [["BobYang", "AnnZeller"], ["CyAdams"]]
    assert all("last name" in text for text in asked)
    assert f"<{FIRST}>" in asked[0]
    assert f"<{LATER}>" in asked[1]
    assert "// new name!" in asked[1]


def test_a_turn_that_was_never_answered_scores_nothing():
    trace = played(RIGHT[0])
    assert (trace.reward, trace.metrics["all_correct"]) == (0.5, 0.0)


def test_the_mean_is_of_powers():
    close = RIGHT[1].replace("BobYang", "BobYaxg")
    similar = 1 - 1 / len("cyadams // new name!\nbobyang\nannzeller")
    assert played(RIGHT[0], close).reward == pytest.approx((1 + similar**4) / 2)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (format_block(FIRST, ["AnnMoss", "BoReed"]), 1.0),
        ("Here:\n" + format_block(FIRST, ["  annmoss ", "", "BOREED"]) + "\nDone.", 1.0),
        ("AnnMoss\nBoReed", 0.0),
        (f"<{FIRST}>\nAnnMoss\nBoReed", 0.0),
        (format_block(LATER, ["AnnMoss", "BoReed"]), 0.0),
        (format_block(FIRST, []), 0.0),
        ("", 0.0),
    ],
)
def test_lines_in_the_right_tags_count_whatever_their_case_and_spaces(reply, value):
    assert score_reply(reply, FIRST, ["AnnMoss", "BoReed"]) == value


def test_several_blocks_count_only_while_they_improve():
    lines = ["AnnMoss", "BoReed"]
    good, worse, bad = (
        format_block(FIRST, lines),
        format_block(FIRST, ["AnnMoss", "BoRxxx"]),
        format_block(FIRST, ["x"]),
    )
    assert score_reply(worse + good, FIRST, lines) == 1.0
    assert score_reply(bad + worse + good, FIRST, lines) == 1.0
    assert 0 < score_reply(bad + worse, FIRST, lines) < 1
    assert score_reply(good + good, FIRST, lines) == 0.0
    assert score_reply(good + worse, FIRST, lines) == 0.0
    assert score_reply(worse + bad + good, FIRST, lines) == 0.0


def test_turns_and_names_keep_to_the_config():
    config = AlphabetSortConfig(min_turns=2, max_turns=4, min_names=2, max_names=3, num_tasks=100)
    tasks = list(AlphabetSort(config).load())
    assert {len(task.turns) for task in tasks} == {2, 3, 4}
    assert {len(names) for task in tasks for names in task.turns} == {2, 3}
    assert {task.by for task in tasks} == {"first", "last"}
    assert all(len(set(sum(task.turns, ()))) == sum(map(len, task.turns)) for task in tasks)


def test_names_are_two_capitalised_words():
    assert all(name.istitle() and name.isalpha() for names in load_names() for name in names)


@pytest.mark.parametrize("wrong", [{"min_turns": 4}, {"min_names": 6}, {"max_turns": 0}, {"names": 3}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValidationError):
        AlphabetSortConfig(**wrong)
