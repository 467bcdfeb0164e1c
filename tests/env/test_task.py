"""A task is frozen plain data; its identity is its content, or its key."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from ramify.env import Task
from ramify.errors import ValueRefused


def test_fields_of_the_users_own_are_kept_and_travel():
    task = Task(prompt="p", answer=[1, 2], difficulty="hard", words=["a", "b"])
    assert task.difficulty == "hard"
    again = Task.from_wire(task.to_wire())
    assert again == task
    assert again.words == ["a", "b"]


def test_a_task_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Task(prompt="p").prompt = "q"  # type: ignore[misc]


def test_the_wire_form_holds_what_was_said_and_no_defaults():
    assert Task(prompt="p", answer="a").to_wire() == {"prompt": "p", "answer": "a"}


def test_the_identity_is_a_content_hash_that_is_the_same_in_every_process():
    task = Task(prompt="p", answer={"b": 1, "a": 2})
    assert task.identity == Task(answer={"a": 2, "b": 1}, prompt="p").identity
    assert task.identity != Task(prompt="p", answer={"b": 1, "a": 3}).identity
    assert len(task.identity) == 16
    script = "from ramify import Task; print(Task(prompt='p', answer={'a': 2, 'b': 1}).identity)"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == task.identity


def test_a_key_is_the_identity_where_there_is_one():
    assert Task(prompt="p", key="task-7").identity == "task-7"


def test_the_identity_survives_the_wire():
    task = Task(prompt=({"role": "user", "content": "hi"},), answer=(1, 2), extra={"x": None})
    assert Task.from_wire(task.to_wire()).identity == task.identity


@pytest.mark.parametrize("field", ["answer", "anything"])
def test_a_value_that_is_not_plain_is_refused_naming_key_and_type(field):
    with pytest.raises(ValueRefused, match=rf"task\.{field}.*set"):
        Task(prompt="p", **{field: {1, 2}})


def test_a_subclass_declares_typed_fields():
    class Puzzle(Task):
        size: int

    assert Puzzle.from_wire(Puzzle(prompt="p", size=3).to_wire()).size == 3
    with pytest.raises(ValidationError, match="size"):
        Puzzle(prompt="p", size="big")  # type: ignore[arg-type]
