"""reverse-text: reproducible texts, and scores as in published results."""

import random
import statistics
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.reversal import (
    SYSTEM,
    extract_tagged,
    generate_texts,
    is_well_formed,
    reverse,
    score_exact,
    score_similarity,
    wrap_in_tags,
)
from ramify.env.tasksets.reverse_text import ReverseText, ReverseTextConfig
from ramify.env.tasksets.splits import assign_split
from tests.support.scripted_agent import play


def test_same_config_gives_the_same_texts():
    config = ReverseTextConfig(num_tasks=200)
    assert list(generate_texts(config)) == list(generate_texts(config))
    assert list(generate_texts(config))[:4] == ["courage", "window", "flood", "bowl way"]


@given(min_chars=st.integers(1, 30), more=st.integers(4, 30), alphabet=st.sampled_from(["", " "]))
def test_texts_are_distinct_and_follow_lengths_and_alphabet(min_chars, more, alphabet):
    letters = string.ascii_lowercase + alphabet
    config = ReverseTextConfig(min_chars=min_chars, max_chars=min_chars + more, alphabet=letters, num_tasks=40)
    texts = list(generate_texts(config))
    assert len(set(texts)) == 40
    assert all(min_chars <= len(text) <= min_chars + more and set(text) <= set(letters) for text in texts)
    assert all(text == text.strip() for text in texts)


def test_too_many_texts_is_an_error():
    with pytest.raises(ConfigInvalid, match="num_tasks is 100000"):
        list(generate_texts(ReverseTextConfig(min_chars=1, max_chars=3, num_tasks=100_000)))


def test_alphabet_without_words_is_an_error():
    with pytest.raises(ConfigInvalid, match="alphabet 'XYZ'"):
        list(generate_texts(ReverseTextConfig(alphabet="XYZ")))


def test_min_chars_above_max_chars_is_refused():
    with pytest.raises(ValidationError, match="above max_chars"):
        ReverseTextConfig(min_chars=9, max_chars=8)


def test_lines_of_a_file_belong_to_one_split_each(tmp_path):
    lines = [f"Line number {number}!" for number in range(60)]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([*lines, "", lines[0]]))
    train = list(generate_texts(ReverseTextConfig(path=file)))
    eval_texts = list(generate_texts(ReverseTextConfig(path=file, split="eval")))
    assert sorted(train + eval_texts) == sorted(lines)
    assert all(assign_split(text) == "eval" for text in eval_texts)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"nowhere\.txt"):
        list(generate_texts(ReverseTextConfig(path=tmp_path / "nowhere.txt")))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (wrap_in_tags("olleh"), "olleh"),
        ("Sure: " + wrap_in_tags(" olleh \n") + " there.", "olleh"),
        (wrap_in_tags("first") + wrap_in_tags("second"), "first"),
        (wrap_in_tags("two\nlines"), "two\nlines"),
        ("olleh", ""),
        ("<reversed_text>olleh", ""),
        ("", ""),
    ],
)
def test_extract_tagged_takes_the_first_match(reply, text):
    assert extract_tagged(reply) == text


def test_scores_of_right_wrong_and_missing_answers():
    assert (score_similarity(wrap_in_tags("olleh"), "olleh"), score_exact(wrap_in_tags("olleh"), "olleh")) == (1.0, 1.0)
    assert score_similarity(wrap_in_tags("ollxx"), "olleh") == pytest.approx(2 * 3 / 10)
    assert score_exact(wrap_in_tags("ollxx"), "olleh") == 0.0
    assert (score_similarity("olleh", "olleh"), score_exact("olleh", "olleh")) == (0.0, 0.0)


@pytest.mark.parametrize(
    "reply",
    ["olleh", wrap_in_tags(""), wrap_in_tags("a") + wrap_in_tags("b"), "so: " + wrap_in_tags("a"), "<reversed_text>a"],
)
def test_malformed_replies(reply):
    assert not is_well_formed(reply)
    assert is_well_formed(wrap_in_tags("olleh") + "\n")


def test_random_letters_and_echoes_score_low():
    """On sentences, as in published results: random letters score about 0.18, the text itself about 0.22."""
    rng = random.Random(0)
    texts = list(generate_texts(ReverseTextConfig(min_chars=20, max_chars=80, num_tasks=300)))
    letters = [wrap_in_tags("".join(rng.choice(string.ascii_lowercase) for _ in text)) for text in texts]
    noise = statistics.mean(score_similarity(reply, reverse(text)) for reply, text in zip(letters, texts))
    echo = statistics.mean(score_similarity(wrap_in_tags(text), reverse(text)) for text in texts)
    assert noise == pytest.approx(0.18, abs=0.04)
    assert echo == pytest.approx(0.22, abs=0.04)


async def test_taskset_scores_the_last_reply():
    taskset = ReverseText(ReverseTextConfig(num_tasks=1))
    (task,) = taskset.load()
    assert (task.prompt, task.system, task.answer) == ("courage", SYSTEM, "egaruoc")
    played = await play(taskset, task, [wrap_in_tags("egaruox")])
    assert played.rewards == {"similarity": (pytest.approx(2 * 6 / 14), 1.0)}
    assert played.metrics == {"exact": 0.0, "well_formed": 1.0}


@pytest.mark.process
def test_reversal_module_does_not_import_env():
    code = "import sys, ramify.env.tasksets.reversal; sys.exit('ramify.env.taskset' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
