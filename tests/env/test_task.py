"""A task is frozen plain data; its identity is its key or a content digest."""

import pickle
import subprocess
import sys
from copy import deepcopy

import pytest
from pydantic import ValidationError

from ramify.core.errors import OperationInvalid
from ramify.env import Task


def test_extra_fields_survive_the_wire_form():
    task = Task(prompt="p", answer=[1, 2], difficulty="hard", words=["a", "b"])
    assert task.difficulty == "hard"
    decoded = Task.from_wire(task.to_wire())
    assert decoded == task
    assert decoded.words == ["a", "b"]


def test_wire_form_leaves_out_defaults():
    assert Task(prompt="p", answer="a").to_wire() == {"prompt": "p", "answer": "a"}


@pytest.mark.process
def test_identity_is_a_content_digest_that_is_equal_in_every_process():
    task = Task(prompt="p", answer={"b": 1, "a": 2})
    assert task.identity == Task(answer={"a": 2, "b": 1}, prompt="p").identity
    assert task.identity != Task(prompt="p", answer={"b": 1, "a": 3}).identity
    assert len(task.identity) == 16
    script = "from ramify import Task; print(Task(prompt='p', answer={'a': 2, 'b': 1}).identity)"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == task.identity


def test_key_is_the_identity_if_given():
    assert Task(prompt="p", key="task-7").identity == "task-7"


def test_identity_survives_the_wire_form():
    task = Task(prompt=({"role": "user", "content": "hi"},), answer=(1, 2), extra={"x": None})
    assert Task.from_wire(task.to_wire()).identity == task.identity


@pytest.mark.parametrize("field", ["answer", "anything"])
def test_value_that_is_not_plain_is_refused_with_key_and_type(field):
    with pytest.raises(OperationInvalid, match=rf"task\.{field}.*set"):
        Task(prompt="p", **{field: {1, 2}})


def test_subclass_declares_typed_fields():
    class Puzzle(Task):
        size: int

    assert Puzzle.from_wire(Puzzle(prompt="p", size=3).to_wire()).size == 3
    with pytest.raises(ValidationError, match="size"):
        Puzzle(prompt="p", size="big")  # type: ignore[arg-type]


def test_changed_copy_has_an_identity_of_its_own():
    task = Task(prompt="one", answer={"parts": {"x": 1}})
    assert task.model_copy().identity == task.identity
    changed = task.model_copy(update={"prompt": "two"})
    assert changed.to_wire() == {"prompt": "two", "answer": {"parts": {"x": 1}}}
    assert changed.identity == Task.from_wire(changed.to_wire()).identity != task.identity


def test_copied_and_unpickled_tasks_are_equal():
    task = Task(prompt="one", answer={"parts": {"x": 1}})
    assert task.identity  # cached values are copied too
    for copy in (task.model_copy(deep=True), deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert copy == task and copy.identity == task.identity
