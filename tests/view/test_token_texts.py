"""The texts of single tokens."""

import pytest

from ramify.view.token_texts import TokenTexts


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


def test_without_a_tokenizer_the_ids_are_shown():
    assert TokenTexts.load("no-such-model").decode([7, 8]) == ["⟨7⟩", "⟨8⟩"]
