"""color-codeword: squares in three turns, and the codeword in the last reply."""

import random

import pytest

from ramify.env.tasksets.color_codeword import (
    BRIEF_REQUEST,
    COLORS,
    ColorCodeword,
    ColorCodewordConfig,
    ColorCodewordTask,
    find_codeword,
    make_square,
)
from ramify.env.tasksets.splits import assign_split
from ramify.model.images import decode_image
from ramify.trace import MediaPart
from tests.support.scripted_agent import play

TASK = ColorCodewordTask(turns=("AB", "CI", "AA"), answer="ABCIAA", seed=42)


async def play_task(*replies: str, **config):
    return await play(ColorCodeword(ColorCodewordConfig(**config)), TASK, replies)


def test_a_square_is_a_png_of_one_colour():
    for _, color in COLORS.values():
        pixels = decode_image(make_square(color))
        assert pixels.shape == (100, 100, 3) and (pixels == color).all()


async def test_the_user_shows_two_squares_in_each_of_three_turns():
    trace = await play_task("AB", "ABCI", "ABCIAA", "more?")
    users = [node.message for node in trace.nodes if node.message.role == "user"]
    assert len(users) == 3
    media = {item.hash: item for item in trace.graph.media}
    shown = [
        tuple(decode_image(media[part.hash].data)[0, 0])
        for message in users
        for part in message.content
        if isinstance(part, MediaPart)
    ]
    assert shown == [COLORS[letter][1] for letter in TASK.answer]
    assert len(media) == 4  # A, B, C and I: equal squares are one image
    assert [message.text.partition(".")[0] for message in users] == ["2 squares", "2 more squares", "2 more squares"]
    assert ["all 6" in message.text for message in users] == [False, False, True]


async def test_the_brief_prompt_is_the_one_of_tiny_vision():
    taskset = ColorCodeword(ColorCodewordConfig(num_tasks=1, brief_prompt=True))
    (task,) = taskset.load()
    trace = await play(taskset, task, taskset.gold(task))
    assert task.system.startswith("Squares stand for letters: red A, green B")
    assert {node.message.text for node in trace.nodes if node.message.role == "user"} == {BRIEF_REQUEST}


@pytest.mark.parametrize(
    ("reply", "reward", "partial_match"),
    [
        ("ABCIAA", 1.0, 1.0),
        ("The word is ABCIAA.", 1.0, 1.0),
        ("ABCIAB", 0.0, 5 / 6),
        ("ABC", 0.0, 0.5),
        ("ABCIAAA", 0.0, 1.0),
        ("none", 0.0, 0.0),
        ("abciaa", 1.0, 1.0),
        ("A-B-C-I-A-A", 0.0, 1 / 6),
        ("_ABCIAA_", 1.0, 1.0),
    ],
)
async def test_the_last_reply_is_scored(reply, reward, partial_match):
    trace = await play_task("AB", "ABCI", reply)
    assert trace.reward == reward
    assert trace.metrics == {"partial_match": pytest.approx(partial_match)}
    assert (await play_task("AB", "ABCI", reply, partial_credit=True)).reward == pytest.approx(partial_match)


async def test_the_last_reply_counts_if_the_conversation_ended_early():
    trace = await play_task("AB")
    assert (trace.reward, trace.metrics) == (0.0, {"partial_match": pytest.approx(2 / 6)})


def extract_as_documented(response: str) -> str:
    """The longest separate sequence of the letters A to I in any case, or else all such letters of the response."""
    words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in response.upper()).split()
    sequences = [word for word in words if set(word) <= set("ABCDEFGHI")]
    sequences.sort(key=len, reverse=True)
    return sequences[0] if sequences else "".join(letter for letter in response.upper() if letter in "ABCDEFGHI")


def score_as_documented(codeword: str, responses: list[str]) -> tuple[float, float]:
    """Reward 1 for the exact codeword, else 0, and the fraction of letters that are correct at each position."""
    found = extract_as_documented(responses[-1])
    correct = [index for index, letter in enumerate(codeword) if found[index : index + 1] == letter]
    return float(found == codeword), len(correct) / len(codeword)


def draw_response(rng: random.Random, codeword: str) -> str:
    """A response as models write them: letters may be wrong, missing, lower-case, apart, or in a sentence."""
    letters = "".join(rng.choice("ABCDEFGHI") if rng.random() < 0.1 else letter for letter in codeword)
    letters = rng.choice([letters] * 5 + [letters[:-1], letters + "A", letters.lower(), " ".join(letters), ""])
    return rng.choice(["{}", "{}", "{}", "{}.", "The codeword is {}", "a **{}**", "_{}_", "Red, blue: {} (6)"]).format(
        letters
    )


@pytest.mark.parametrize("turns", [3, 5])
async def test_64_tasks_have_the_scores_of_the_documented_environment(turns):
    rng = random.Random(0)
    taskset = ColorCodeword(ColorCodewordConfig(num_tasks=64, num_turns=turns))
    scores = []
    for task in taskset.load():
        assert (len(task.turns), task.seed) == (turns, 42)
        responses = [draw_response(rng, task.answer[: 2 * turn]) for turn in range(1, turns + 1)]
        trace = await play(taskset, task, responses)
        scores.append((trace.reward, trace.metrics["partial_match"]))
        assert scores[-1] == pytest.approx(score_as_documented(task.answer, responses))
    assert len(scores) == 64 and {reward for reward, _ in scores} == {0.0, 1.0}
    assert len({partial_match for _, partial_match in scores}) > 3


def test_tasks_are_the_documented_ones_of_the_seed():
    """One random choice of the nine colours for each square, in order; here without the tasks of the other split."""
    rng = random.Random(42)
    codewords = ["".join(rng.choice("ABCDEFGHI") for _ in range(6)) for _ in range(64)]
    expected = [word for word in codewords if assign_split(word) == "train"]
    tasks = list(ColorCodeword(ColorCodewordConfig(num_tasks=len(expected))).load())
    assert [task.answer for task in tasks] == expected


def test_the_longest_run_of_letters_is_the_codeword():
    assert find_codeword("A: ABC or DEFGH") == "DEFGH"
    assert find_codeword("AB CD") == "AB"
    assert find_codeword("xAB yC") == "ABC"  # no separate sequence: all letters


async def test_gold_replies_score_one():
    taskset = ColorCodeword(ColorCodewordConfig(num_tasks=2))
    for task in taskset.load():
        assert (await play(taskset, task, taskset.gold(task))).reward == 1.0


def test_splits_share_no_codeword():
    words = {
        split: {task.answer for task in ColorCodeword(ColorCodewordConfig(split=split, num_tasks=300)).load()}
        for split in ("train", "eval")
    }
    assert len(words["train"]) == len(words["eval"]) == 300 and not words["train"] & words["eval"]
