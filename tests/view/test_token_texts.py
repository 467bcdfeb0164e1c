"""The texts of single tokens."""

import pytest

from ramify.view.token_view import TokenTexts


@pytest.fixture(scope="module")
def texts():
    return TokenTexts.load("tiny")


def encode(texts, text):
    return texts._tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_a_split_character_appears_at_the_token_that_completes_it(texts):
    token_ids = encode(texts, "a🎉b")
    decoded = texts.decode(token_ids)
    assert len(decoded) == len(token_ids) > 3
    assert "".join(decoded) == "a🎉b"


def test_the_bytes_of_a_character_that_is_not_completed_are_shown_at_the_last_token(texts):
    token_ids = encode(texts, "a🎉")[:-1]
    assert texts.decode(token_ids)[-1] == "\ufffd"
    assert texts.decode([]) == []


@pytest.mark.parametrize("model", ["no-such-model", "", "~nobody/model", "a\0b", "x" * 5000])
def test_without_a_tokenizer_the_ids_are_shown(model):
    assert TokenTexts.load(model).decode([7, 8]) == ["⟨7⟩", "⟨8⟩"]


def test_an_id_that_no_token_has_is_shown_as_a_number(texts):
    assert texts.decode([-1, 2**31 - 1]) == ["⟨-1⟩", "⟨2147483647⟩"]
