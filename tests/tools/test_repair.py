"""The bugs of `repair`: the same on every machine, and each one an edit that can be parsed."""

import ast
import json
import os

import pytest

from ramify.env.tasksets.repair import load_bugs, load_cases, load_sources
from tools.repair.__main__ import build_cases, call_with_limit, find_bugs, load_source
from tools.repair.arguments import ARGUMENTS
from tools.repair.mutations import find_edits

MODULES = list(ARGUMENTS) if os.environ.get("RAMIFY_FULL") else ["windows", "roman"]


@pytest.mark.parametrize("name", MODULES)
def test_generator_makes_the_stored_cases_and_bugs_again(name):
    cases = json.loads(json.dumps(build_cases(name)))
    assert cases == load_cases()[name]
    assert json.loads(json.dumps(find_bugs(name, cases))) == [bug for bug in load_bugs() if bug["module"] == name]


def test_every_module_has_arguments_for_every_function():
    for name, functions in ARGUMENTS.items():
        tree = ast.parse(load_sources()[name])
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {function for function in defined if not function.startswith("_")} == set(functions)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b", "return a > b", "return not (a < b)"}),
        ("return a + 1", {"return a - 1", "return a + 2", "return a"}),
        (
            "return a and not b",
            {"return a or not b", "return a", "return not b", "return a and b", "return not (a and not b)"},
        ),
        (
            "return a[1:b]",
            {
                "return a[:b]",
                "return a[2:b]",
                "return a[0:b]",
                "return a[1:]",
                "return a[1:b + 1]",
                "return a[1:b - 1]",
            },
        ),
        ("return min(a, b)", {"return max(a, b)", "return min(b, a)"}),
        ("a += b", {"a -= b", "a = b", "pass"}),
        ("return -1", {"return 0", "return 1", "return -2"}),
    ],
)
def test_operators_change_one_thing(line, expected):
    source = f"def f(a, b):\n    {line}\n"
    assert {edit.apply(source).splitlines()[1].strip() for edit in find_edits(source)} == expected


def test_docstrings_are_never_changed():
    source = 'def f(a):\n    """Return 1 + 1 if a < 2."""\n    return a\n'
    assert find_edits(source) == []


def test_endless_call_is_found_by_its_lines():
    module = load_source("endless", "def f():\n    while True:\n        pass\n")
    assert call_with_limit(module, {"function": "f", "args": []}) == {"endless": True}
