"""wordle: marks of repeated letters, six guesses, one warning."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.wordle import Wordle, WordleConfig, compute_feedback, load_words, parse_guess, play_replies
from tests.support import scripted_agent

TASK = next(iter(Wordle().load())).model_copy(update={"answer": "crane"})
LETTERS = st.text("abc", min_size=5, max_size=5)  # few letters, so that they repeat


def marks_by_rules(guess: str, secret: str) -> str:
    """Compute marks step by step: greens use up letters of the secret, then yellows from the left."""
    marks, unmatched = ["X"] * 5, list(secret)
    for index in range(5):
        if guess[index] == secret[index]:
            marks[index] = "G"
            unmatched.remove(guess[index])
    for index in range(5):
        if marks[index] == "X" and guess[index] in unmatched:
            marks[index] = "Y"
            unmatched.remove(guess[index])
    return "".join(marks)


@given(guess=LETTERS, secret=LETTERS)
def test_marks_follow_the_rules(guess, secret):
    assert compute_feedback(guess, secret) == marks_by_rules(guess, secret)


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "crane", "XXYXG"),
        ("allow", "llama", "YGYXX"),
        ("level", "crane", "XYXXX"),
        ("light", "crane", "XXXXX"),
    ],
)
def test_marks_of_repeated_letters(guess, secret, marks):
    assert compute_feedback(guess, secret) == marks


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("[crane]", "crane"),
        ("I say [CRANE], not [slate].", "crane"),
        ("[1] my guess: [slate]", "slate"),
        ("crane", None),
        ("[]", None),
        ("[crane", None),
        ("", None),
    ],
)
def test_parse_guess_takes_the_first_word_in_brackets(reply, guess):
    assert parse_guess(reply) == guess


def test_win_scores_one_after_any_number_of_guesses():
    game = play_replies("crane", ["[light]", "[slate]", "[crane]"])
    assert (game.is_over, game.score, len(game.guesses)) == (True, 1.0, 3)


def test_loss_scores_the_latest_valid_guess():
    wrong = ["[light]", "[moist]", "[bread]", "[plumb]", "[drink]", "[brake]"]
    game = play_replies("crane", wrong)
    assert game.is_over
    assert game.marks == "XGGXG"
    assert game.score == pytest.approx(3 / 5)


def test_yellows_are_worth_half():
    assert play_replies("crane", ["[eaten]"]).marks == "YYXXY"
    assert play_replies("crane", ["[eaten]"]).score == pytest.approx(0.5 * 3 / 5)


@pytest.mark.parametrize("invalid", ["crane", "[cranes]", "[xxxxx]", "[light]"])
def test_second_invalid_guess_in_a_row_ends_the_game(invalid):
    warned = play_replies("crane", ["[light]", invalid])
    assert (warned.is_over, bool(warned.problem), warned.guesses) == (False, True, ("light",))
    assert play_replies("crane", ["[light]", invalid, "[crane]"]).score == 1.0
    assert play_replies("crane", ["[light]", invalid, invalid]).is_over
    assert not play_replies("crane", ["[light]", invalid, "[slate]", invalid]).is_over


def test_invalid_guesses_keep_the_last_valid_score():
    assert play_replies("crane", ["[slate]", "?", "?", "[crane]"]).score == pytest.approx(2 / 5)
    assert play_replies("crane", ["?", "?"]).score == 0.0


def test_invalid_guesses_are_not_counted():
    replies = [word for guess in ["light", "moist", "bread", "plumb", "drink", "crane"] for word in ("?", f"[{guess}]")]
    assert play_replies("crane", replies).score == 1.0


async def test_user_answers_with_marks_and_warnings_until_the_end():
    trace = await scripted_agent.play(Wordle(), TASK, ["[slate]", "hm", "[crane]", "[light]"])
    opening, marks, warning = scripted_agent.get_texts(trace, "user")
    assert opening == TASK.prompt
    assert marks == "SLATE\nXXGXG"
    assert "[word]" in warning
    assert len(scripted_agent.get_texts(trace, "assistant")) == 3
    assert (trace.reward, trace.metrics) == (1.0, {"guesses": 2.0})


def test_word_list_is_lowercase_sorted_and_long():
    assert len(load_words()) >= 500
    assert list(load_words()) == sorted(set(load_words()))
    assert all(len(word) == 5 and set(word) <= set(string.ascii_lowercase) for word in load_words())


def test_every_word_belongs_to_one_split():
    train, held = ({task.answer for task in Wordle(WordleConfig(split=split)).load()} for split in ("train", "eval"))
    assert train | held == set(load_words())
    assert not train & held


def test_too_many_secrets_is_an_error():
    with pytest.raises(ConfigInvalid, match="num_tasks is 5000"):
        list(Wordle(WordleConfig(num_tasks=5000)).load())
