"""color-codeword: squares in three turns, and the codeword in the last reply."""

import pytest

from ramify.env.tasksets.color_codeword import (
    COLORS,
    ColorCodeword,
    ColorCodewordConfig,
    ColorCodewordTask,
    find_codeword,
    make_square,
)
from ramify.model.images import decode_image
from ramify.trace import MediaPart
from tests.support.scripted_agent import play

TASK = ColorCodewordTask(turns=("AB", "CI", "AA"), answer="ABCIAA")


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
    assert all("codeword so far" in message.text for message in users)


@pytest.mark.parametrize(
    ("reply", "reward", "partial_match"),
    [
        ("ABCIAA", 1.0, 1.0),
        ("The word is ABCIAA.", 1.0, 1.0),
        ("ABCIAB", 0.0, 5 / 6),
        ("ABC", 0.0, 0.5),
        ("ABCIAAA", 0.0, 1.0),
        ("nothing", 0.0, 0.0),
        ("abciaa", 0.0, 0.0),
    ],
)
async def test_the_last_reply_is_scored(reply, reward, partial_match):
    trace = await play_task("AB", "ABCI", reply)
    assert trace.reward == reward
    assert trace.metrics == {"partial_match": pytest.approx(partial_match)}
    assert (await play_task("AB", "ABCI", reply, partial_credit=True)).reward == pytest.approx(partial_match)


async def test_a_conversation_that_ended_early_scores_nothing():
    trace = await play_task("ABCIAA")
    assert (trace.reward, trace.metrics) == (0.0, {"partial_match": 0.0})


def test_the_longest_run_of_letters_is_the_codeword():
    assert find_codeword("A: ABC or DEFGH") == "DEFGH"
    assert find_codeword("AB CD") == "AB"


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
