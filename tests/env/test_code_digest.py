"""The code of an environment: its module, and the modules of its own package that it imports."""

import importlib
import sys

import pytest

from ramify.env import plugin
from ramify.env.code_digest import compute_code_digests
from ramify.rollout import Environment, SourceConfig

TASKSET = "import ramify as rf\n{imports}\nclass Mine(rf.Taskset):\n    def load(self):\n        return []\n"


def write(folder, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def importable(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_module_of_a_package_includes_imported_modules_of_that_package(importable):
    write(
        importable,
        {
            "mine/__init__.py": "",
            "mine/env.py": TASKSET.format(imports="import json\nfrom .scoring import score\nimport other"),
            "mine/scoring/__init__.py": "def score():\n    from mine import words\n",
            "mine/words.py": "from .scoring import extra\n",
            "mine/scoring/extra.py": "",
            "mine/unused.py": "",
            "other.py": "",
        },
    )
    (importable / "mine" / "scoring" / "__init__.py").write_text(
        "from . import extra\ndef score():\n    from mine import words\n"
    )
    digests = compute_code_digests(importlib.import_module("mine.env").Mine)
    assert list(digests) == [
        "mine/__init__.py",
        "mine/env.py",
        "mine/scoring/__init__.py",
        "mine/scoring/extra.py",
        "mine/words.py",
    ]


def test_file_includes_imported_modules_of_its_directory_only(importable):
    write(importable, {"env.py": TASKSET.format(imports="import helpers, numpy"), "helpers.py": "", "unused.py": ""})
    assert list(compute_code_digests(plugin.find_plugin_class("taskset", str(importable / "env.py")))) == [
        "env.py",
        "helpers.py",
    ]


def test_edited_file_is_loaded_again_with_another_digest(importable):
    path = importable / "env.py"
    path.write_text(TASKSET.format(imports=""))
    first = plugin.find_plugin_class("taskset", str(path))
    assert plugin.find_plugin_class("taskset", str(path)) is first
    before = compute_code_digests(first)
    path.write_text(TASKSET.format(imports="# edited"))
    second = plugin.find_plugin_class("taskset", str(path))
    assert compute_code_digests(second) != before
    assert compute_code_digests(first) == before  # what was loaded is what counts


def test_of_ramify_only_builtin_tasksets_are_included(importable):
    built_in = Environment.load(SourceConfig(taskset={"id": "reverse-text"})).identity["code"]
    assert "ramify/env/tasksets/reverse_text.py" in built_in
    assert all(name.startswith("ramify/env/tasksets/") for name in built_in)
    write(
        importable,
        {"env.py": TASKSET.format(imports="from ramify.env.tasksets.wordle import Wordle\nimport ramify.env")},
    )
    digests = compute_code_digests(plugin.find_plugin_class("taskset", f"{importable / 'env.py'}:Mine"))
    assert {"env.py", "ramify/env/tasksets/wordle.py"} <= set(digests)
    assert all(name.startswith("ramify/env/tasksets/") for name in digests if name != "env.py")


def test_custom_harness_is_part_of_the_environment(importable):
    text = "from ramify.rollout.harness.chat import ChatHarness\nclass Patient(ChatHarness):\n    pass\n"
    write(importable, {"env.py": TASKSET.format(imports=""), "agent.py": text})
    source = SourceConfig(taskset={"id": str(importable / "env.py")}, harness={"id": str(importable / "agent.py")})
    assert set(Environment.load(source).identity["code"]) == {"env.py", "agent.py"}


def test_class_without_a_file_is_identified_by_its_functions():
    def define_taskset(reward: str) -> type:
        names: dict = {"__name__": "session"}
        exec(f"class Mine:\n    def any(self):\n        return {reward}\n", names)
        return names["Mine"]

    first, same, other = define_taskset("1.0"), define_taskset("1.0"), define_taskset("0.5")
    assert compute_code_digests(first) == compute_code_digests(same)
    assert compute_code_digests(first) != compute_code_digests(other)
