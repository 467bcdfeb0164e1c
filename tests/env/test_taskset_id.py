"""Ids of taskset classes: import paths, and files for classes that are defined in a notebook."""

import linecache
import sys
import types
from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env import plugin
from ramify.env.taskset_id import build_taskset_table, get_class_id
from ramify.env.tasksets.reverse_text import ReverseText, ReverseTextConfig

CELLS = [
    """
import random as chance
import re
from fractions import Fraction
from pathlib import Path as Place

import ramify as rf

WORDS = ["a", "b"]
HALF = Fraction(1, 2)
PATTERN = re.compile("x+")
result = object()
""",
    """
class Settings(rf.TasksetConfig):
    size: int = len(WORDS)


def helper(text):
    result = PATTERN.match(text)
    return bool(result)


@rf.reward
def unused(trace):
    return result
""",
    """
class Noted(rf.Taskset):
    config: Settings

    def load(self):
        for word in WORDS[: self.config.size]:
            yield rf.Task(prompt=word, half=float(HALF), place=str(Place("x")), seed=chance.Random(0).random())

    @rf.reward
    def right(self, trace):
        return float(helper(trace.last_reply))
""",
]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    """A `__main__` without a file, in which cells are executed."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    titles = []

    def execute(*cells: str) -> types.ModuleType:
        for cell in cells:
            title = f"<cell {len(titles)}>"
            titles.append(title)
            linecache.cache[title] = (len(cell), None, cell.splitlines(keepends=True), title)
            exec(compile(cell, title, "exec"), vars(main))
        return main

    yield execute
    for title in titles:
        del linecache.cache[title]


def test_class_of_a_module_or_file_has_its_import_path_as_id(tmp_path):
    assert get_class_id(ReverseText, tmp_path) == "ramify.env.tasksets.reverse_text:ReverseText"
    (tmp_path / "own.py").write_text("import ramify as rf\nclass Own(rf.Taskset):\n    pass\n")
    own = plugin.find_plugin_class("taskset", str(tmp_path / "own.py"))
    assert plugin.find_plugin_class("taskset", get_class_id(own, tmp_path / "folder")) is own
    assert not (tmp_path / "folder").exists()


def test_instance_becomes_its_class_id_and_config(tmp_path):
    table = build_taskset_table(ReverseText(ReverseTextConfig(max_chars=5)), tmp_path)
    assert table == {"id": "ramify.env.tasksets.reverse_text:ReverseText", "max_chars": 5}


def test_notebook_class_is_written_with_exactly_what_it_uses(kernel, tmp_path):
    noted = kernel(*CELLS).Noted
    written = plugin.find_plugin_class("taskset", get_class_id(noted, tmp_path))
    assert written is not noted and written.__module__ != "__main__"
    assert [task.model_dump() for task in written().load()] == [task.model_dump() for task in noted().load()]
    text = (tmp_path / "Noted.py").read_text()
    assert "result = object()" not in text and "unused" not in text


def test_dataclass_without_methods_is_written_too(kernel, tmp_path):
    point = "from dataclasses import dataclass\nimport ramify as rf\n\n\n@dataclass\nclass Point:\n    x: int = 3"
    noted = "class Noted(rf.Taskset):\n    def load(self):\n        yield rf.Task(prompt=str(Point().x))"
    written = plugin.find_plugin_class("taskset", get_class_id(kernel(point, noted).Noted, tmp_path))
    assert [task.prompt for task in written().load()] == ["3"]


def test_cell_that_is_executed_again_is_written_again(kernel, tmp_path):
    get_class_id(kernel(*CELLS).Noted, tmp_path)
    changed = kernel(CELLS[2].replace("WORDS[: self.config.size]", "['c']")).Noted
    written = plugin.find_plugin_class("taskset", get_class_id(changed, tmp_path))
    assert [task.prompt for task in written().load()] == ["c"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "def make():\n    class Inner(rf.Taskset):\n        pass\n    return Inner\nNoted = make()",
            "inside a function",
        ),
        (
            "exec('lost = object()')\nclass Noted(rf.Taskset):\n    def load(self):\n        return lost",
            "'lost', a object",
        ),
    ],
)
def test_class_that_cannot_be_written_is_refused(kernel, tmp_path, cell, message):
    noted = kernel("import ramify as rf", cell).Noted
    with pytest.raises(ConfigInvalid, match=message):
        get_class_id(noted, tmp_path)


def test_unchanged_definition_is_not_written_again(kernel, tmp_path):
    noted = kernel(*CELLS).Noted
    get_class_id(noted, tmp_path)
    before = Path(tmp_path / "Noted.py").stat().st_mtime_ns
    get_class_id(noted, tmp_path)
    assert Path(tmp_path / "Noted.py").stat().st_mtime_ns == before
