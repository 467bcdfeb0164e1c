"""The check of phrases finds each of them, and leaves plain English alone. `make lint` runs it on the repository."""

import pytest

from tools.words import find_phrases


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("the prompt follows\n    that of the task", "that of"),
        ("# compared with those\n# of the trainer", "those of"),
        ("node 7 is no reply", "is no reply"),
        ("a fresh box", "box"),
        ("a call was given up", "given up"),
        ("the head epoch", "head epoch"),
        ("an abandoned call", "abandoned"),
    ],
)
def test_phrase_is_found_with_its_line(text, phrase):
    [(line, matched, advice)] = find_phrases(text)
    assert (line, matched) == (text[: text.index(phrase.split()[0])].count("\n") + 1, phrase) and advice


@pytest.mark.parametrize(
    "text", ["if there is\nno reply", "it is no longer used", "is no more than 3", "Table(box=None)", "gives up to one"]
)
def test_plain_english_passes(text):
    assert list(find_phrases(text)) == []
