"""The public API is documented: in docstrings, which `help` shows, and on `docs/api.md`, both completely."""

import functools
import inspect
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify.env.decorators import HookKind
from ramify.env.taskset import TasksetHooks

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text("utf-8")
SECTIONS = {
    match[1]: match[0] for match in re.finditer(r"^### `rf\.(\w+)[^\n]*\n.*?(?=^##|\Z)", PAGE, re.DOTALL | re.M)
}
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `@?rf\.(\w+)[^\n]*$", PAGE, re.MULTILINE)}

OBJECTS: dict[str, Any] = {name: getattr(ramify, name) for name in ramify.__all__}
CLASSES = {name: value for name, value in OBJECTS.items() if isinstance(value, type)}
MODULES = {name: value for name, value in OBJECTS.items() if inspect.ismodule(value)}
FUNCTIONS = {name: value for name, value in OBJECTS.items() if name not in CLASSES and name not in MODULES}
HOOKS = [field.name for field in fields(TasksetHooks) if field.default is None]
OF_PYDANTIC = {"model_config"}


def own_classes(cls: type) -> list[type]:
    """The class and the bases from which it inherits members that no public class has."""
    public = [base for base in CLASSES.values() if base is not cls and issubclass(cls, base)]
    return [
        base
        for base in cls.__mro__
        if base.__module__.startswith("ramify") and not any(issubclass(known, base) for known in public)
    ]


def members(cls: type) -> dict[str, Any]:
    """The public members that a class defines; the value of an annotated attribute is None."""
    names: dict[str, Any] = {}
    for base in own_classes(cls):
        attributes = dict.fromkeys(inspect.get_annotations(base))
        names |= {name: value for name, value in vars(base).items() if not name.startswith("_")} | attributes
    return {name: value for name, value in names.items() if not name.startswith("_") and name not in OF_PYDANTIC}


def docstrings(cls: type) -> str:
    return "\n".join(base.__doc__ or "" for base in own_classes(cls))


def test_the_page_has_every_public_name_and_no_other():
    assert set(SECTIONS) == set(CLASSES)
    assert set(ROWS) == set(FUNCTIONS)
    assert [name for name in MODULES if f"`rf.{name}`" not in PAGE] == []


@pytest.mark.parametrize("name", OBJECTS)
def test_every_public_name_has_a_docstring(name: str):
    assert vars(OBJECTS[name]).get("__doc__") if name in CLASSES else OBJECTS[name].__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_is_documented_in_the_code_and_on_the_page(name: str):
    undocumented, unlisted, public = [], [], set(CLASSES.values())
    for member, value in members(CLASSES[name]).items():
        value = value.func if isinstance(value, functools.cached_property) else value
        is_code = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        if not (value.__doc__ if is_code else f"`{member}`" in docstrings(CLASSES[name])):
            undocumented.append(member)
        is_override = is_code and any(hasattr(base, member) for base in CLASSES[name].__mro__[1:] if base in public)
        if not is_override and not re.search(rf"`{member}\b", SECTIONS.get(name, "")):
            unlisted.append(member)
    assert (undocumented, unlisted) == ([], [])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_a_function_is_on_the_page_and_in_its_docstring(name: str):
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]
    assert [parameter for parameter in named if not re.search(rf"\b{parameter}\b", ROWS.get(name, ""))] == []
    assert [parameter for parameter in named if f"`{parameter}`" not in FUNCTIONS[name].__doc__] == []


def test_help_and_the_page_show_every_hook_of_a_taskset():
    shown = pydoc.plain(pydoc.render_doc(ramify.Taskset))
    assert {"setup", "gold"} <= set(HOOKS)
    assert [hook for hook in HOOKS if f"`{hook}`" not in shown or f"`{hook}`" not in SECTIONS["Taskset"]] == []
    assert [kind for kind in HookKind if f"`@{kind}`" not in shown or f"`@rf.{kind}`" not in SECTIONS["Taskset"]] == []
