"""The origin of an exception is the innermost line of user code."""

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ramify.core.errors.origin import describe_exception, describe_origin
from ramify.env.hook import run_in_hook_thread

PACKAGE = {
    "__init__.py": "",
    "hooks.py": """
from myenv.parts import words


def right(reply):
    return words.first(reply)


def exact(reply):
    import json
    return json.loads(reply)


def leave(reply):
    exit(3)
""",
    "parts/__init__.py": "",
    "parts/words.py": """
def first(reply):
    return reply.split()[0]  # raises for an empty reply
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        file = tmp_path / "myenv" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield import_module("myenv.hooks")
    for name in [name for name in sys.modules if name.split(".")[0] == "myenv"]:
        del sys.modules[name]


def describe(function, reply: str) -> str:
    """Return the description of the exception that a function raises in a hook thread."""
    with pytest.raises(Exception) as raised:
        asyncio.run(run_in_hook_thread(function, {"reply": reply}))
    return describe_exception(raised.value)


def test_the_origin_is_the_innermost_line_in_the_package_of_the_hook(package):
    origin = "myenv/parts/words.py:3 in first: return reply.split()[0]  # raises for an empty reply"
    assert describe(package.right, "") == f"IndexError: list index out of range ({origin})"


def test_frames_of_libraries_are_skipped(package):
    assert describe(package.exact, "no").endswith("(myenv/hooks.py:11 in exact: return json.loads(reply))")


def test_an_exit_is_described_like_an_exception(package):
    assert describe(package.leave, "") == "RuntimeError: SystemExit: 3 (myenv/hooks.py:15 in leave: exit(3))"


def test_the_origin_is_in_the_first_line_of_a_multiline_message(package):
    error = ValueError("first\nsecond")
    try:
        raise error
    except ValueError:
        pass
    assert describe_exception(error).splitlines()[1:] == ["second"]
    assert f"{Path(__file__).name}:" in describe_exception(error).splitlines()[0]


def test_an_exception_outside_user_code_has_no_origin():
    with pytest.raises(ValueError) as raised:
        json.loads("no")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # without this function
    assert describe_origin(raised.value) == ""
    assert describe_exception(ValueError("never raised")) == "ValueError: never raised"
