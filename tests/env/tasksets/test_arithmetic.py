"""arithmetic: answers that follow from the story, and answers compared as numbers."""

import re

import pytest
from pydantic import ValidationError

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.answers import extract_boxed, is_same_value
from ramify.env.tasksets.arithmetic import SENTENCES, Arithmetic, ArithmeticConfig
from tests.support.scripted_agent import play


def solve(story: str) -> int:
    """Compute the result from the sentences of a story."""
    opening, *steps, _ = re.findall(r"[^.?]+[.?]", story)
    count = int(re.findall(r"\d+", opening)[0])
    for step in steps:
        (number,) = map(int, re.findall(r"\d+", step))
        shape = re.sub(r"\d+", "{n}", step.strip())
        (operation,) = (name for name, sentences in SENTENCES.items() if shape in sentences)
        if operation == "divide":
            assert count % number == 0
        count = {
            "add": count + number,
            "subtract": count - number,
            "multiply": count * number,
            "divide": count // number,
        }[operation]
        assert count >= 0
    return count


def test_answer_matches_the_story():
    for task in Arithmetic().load():
        assert int(task.answer) == solve(task.prompt)


def test_number_of_steps_follows_the_config():
    tasks = Arithmetic(ArithmeticConfig(min_steps=3, max_steps=5, num_tasks=100)).load()
    assert {len(re.findall(r"[.?]", task.prompt)) - 2 for task in tasks} == {3, 4, 5}


def test_only_allowed_operations_are_used():
    tasks = Arithmetic(ArithmeticConfig(operations=("add",), num_tasks=50)).load()
    assert not any(word in task.prompt for task in tasks for word in ("taken", "sold", "lost", "times", "shared"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("\\boxed{42}", 1.0),
        ("First 40, then 42: \\boxed{ 42 }.", 1.0),
        ("\\boxed{40} no, \\boxed{42}", 1.0),
        ("\\boxed{42} no, \\boxed{40}", 0.0),
        ("$\\boxed{42.0}$", 1.0),
        ("\\boxed{84/2}", 1.0),
        ("\\boxed{\\frac{84}{2}}", 1.0),
        ("\\boxed{42\\text{ apples}}", 1.0),
        ("42", 0.0),
        ("\\boxed{42", 0.0),
        ("\\boxed{}", 0.0),
        ("\\boxed{4 2x}", 0.0),
        ("\\boxed{42.01}", 0.0),
        ("\\boxed{1/0}", 0.0),
        ("\\boxed{1e999999999}", 0.0),
        ("", 0.0),
    ],
)
async def test_last_boxed_value_is_scored(reply, reward):
    taskset = Arithmetic(ArithmeticConfig(num_tasks=1))
    task = next(iter(taskset.load())).model_copy(update={"answer": "42"})
    assert (await play(taskset, task, reply)).reward == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{a{b}c} d}", "a{b}c"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1}\\boxed{2", None),
        ("", None),
    ],
)
def test_extract_boxed_balances_braces(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.process  # math-verify compares in a process of its own
@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("1,200", "1200", True),
        ("0.5", "\\dfrac{1}{2}", True),
        ("-\\frac{1}{2}", "-.5", True),
        ("\\$5.00", "5", True),
        ("(1, 2)", "(1,2)", True),
        ("x + 1", "x+1", True),
        ("1,2", "12", False),
        ("x+1", "x+2", False),
        ("", "", False),
    ],
)
def test_answers_are_compared_by_value(answer, expected, same):
    assert is_same_value(answer, expected) is same


@pytest.mark.parametrize(
    "settings", [{"min_steps": 9}, {"operations": ()}, {"operations": ("divide",)}, {"max_number": 1}]
)
def test_configs_without_any_story_are_refused(settings):
    with pytest.raises(ValidationError):
        ArithmeticConfig(**settings)


def test_config_that_never_yields_a_story_is_an_error():
    with pytest.raises(ConfigInvalid, match="only 0 were found"):
        list(Arithmetic(ArithmeticConfig(operations=("multiply",), min_steps=40, max_steps=40)).load())
