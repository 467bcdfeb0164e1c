"""Checks of names that a user wrote."""

from ramify.core.names import find_duplicates, find_similar, format_count, suggest


def test_suggest_names_the_closest_or_says_what_is_known():
    assert suggest("grppo", ["grpo", "rloo"], "known: grpo, rloo") == "did you mean 'grpo'?"
    assert suggest("evall", ["eval"], "", "'ramify {}'") == "did you mean 'ramify eval'?"
    assert suggest("xyz", ["grpo"], "known: grpo") == "known: grpo"


def test_find_similar_respects_the_cutoff():
    assert find_similar("max_step", {"max_steps": 1}) == "max_steps"
    assert find_similar("step", ["max_steps"], cutoff=0.8) is None


def test_find_duplicates_is_sorted():
    assert find_duplicates(["b", "a", "c", "b", "a"]) == ["a", "b"]
    assert find_duplicates(["a", "b"]) == []


def test_counts_of_one_are_singular():
    assert [format_count(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
    assert [format_count(number, "branch") for number in (1, 3)] == ["1 branch", "3 branches"]
    assert [format_count(number, "GPU") for number in (1.0, 0.5)] == ["1 GPU", "0.5 GPUs"]
