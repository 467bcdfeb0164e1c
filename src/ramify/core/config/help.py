"""The help page of a configuration: the keys that people set, the sections, and one section in full.

`--help` is short; `--help SECTION` prints every key of a section, and `--help all` every key of the configuration. The
text of a key is the string below its field in the class, or its entry in the list of the class's docstring.
"""

import ast
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ramify.core.config.base import Config
from ramify.core.config.schema import (
    annotation_options,
    element_options,
    get_field_default,
    is_dict_type,
    is_list_type,
    is_model_type,
    iter_keys,
    model_tag_key,
)
from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest

ALL_KEYS = "all"
ENTRY = "NAME"  # stands for the name of an entry of a table, as in `models.NAME.name`
MAX_WIDTH, FLAG_WIDTH = 120, 40
DOCSTRING_ENTRY = re.compile(r"^- ((?:`\w+`(?:, | and )?)+): (.+?)(?=^\S|^$|\Z)", re.MULTILINE | re.DOTALL)
TYPE_NAMES = {bool: "true|false", int: "INT", float: "NUMBER", NoneType: "None"}


@dataclass(frozen=True, slots=True)
class HelpKey:
    """A key with what may stand there, its default value, and its text."""

    path: str
    options: list[Any]
    default: Any = None
    text: str = ""

    @property
    def models(self) -> list[type[BaseModel]]:
        """The sections that the key holds, itself or as entries of a list or table; none for a plain value."""
        return list(dict.fromkeys(model for option in self.options for model in _find_models(option)))

    def get_child(self, model: type[BaseModel], name: str) -> "HelpKey":
        """Return a key of the section `model`, with the default value of the section's default if it has one."""
        field = model.model_fields[name]
        is_section = model in self.options  # or one section of a list
        is_list, is_table = (not is_section and any(map(test, self.options)) for test in (is_list_type, is_dict_type))
        entry = "0" if is_list else ENTRY if is_table else ""
        default = getattr(self.default, name) if isinstance(self.default, model) else get_field_default(field)
        path = ".".join(filter(None, [self.path, entry, name]))
        return HelpKey(path, annotation_options(field.annotation), default, _read_key_texts(model).get(name, ""))


@dataclass(frozen=True, slots=True)
class HelpSection:
    """A section, or one variant of it, with its plain keys; the sections in it are sections of their own."""

    path: str
    model: type[BaseModel]
    variant: str
    """Which key and value select the variant, such as `engine = 'vllm'`; empty if there is only one."""
    keys: list[HelpKey]


def iter_sections(key: HelpKey) -> Iterator[HelpSection]:
    """Yield the section that a key holds, in all variants, each followed by the sections in it."""
    for model in key.models:
        variant = f"{model_tag_key(model)} = {' or '.join(_find_tags(model))}" if len(key.models) > 1 else ""
        children = [key.get_child(model, name) for name in model.model_fields]
        yield HelpSection(key.path, model, variant, [child for child in children if not child.models])
        for child in children:
            yield from iter_sections(child)


def format_help(cls: type[Config], prog: str, section: str | None = None) -> str:
    """Return the page for one section, for `all` keys or, without a section, the short page.

    Raises ConfigInvalid if there is no such section or key.
    """
    root = HelpKey("", [cls])
    if section is not None:
        return "\n".join(format_section(root if section == ALL_KEYS else _find_key(root, section))).lstrip("\n")
    top_keys = [root.get_child(cls, name) for name in cls.model_fields]
    common_keys = [_find_key(root, path) for path in cls.common_keys]
    common_paths = {key.path for key in common_keys}
    listed = [*common_keys, *(key for key in top_keys if not key.models and key.path not in common_paths)]
    lines = [line for key in listed for line in _format_key(key, _first_sentence(key.text))]
    lines += ["", f"Sections; '{prog} --help SECTION' prints the keys of one, '{prog} --help {ALL_KEYS}' all keys:"]
    for key in top_keys:
        if key.models:
            lines += _format_columns(f"  {key.path}", _first_sentence(key.text or inspect.getdoc(key.models[0]) or ""))
    return "\n".join(lines)


def _find_key(root: HelpKey, path: str) -> HelpKey:
    """Return the key at a path such as `trainer.lora` or `train.0.sampling`. Raises ConfigInvalid if there is none."""
    key = root
    for part in path.strip("[]").removeprefix("--").replace("-", "_").split("."):
        if (part.isdecimal() and any(map(is_list_type, key.options))) or part == ENTRY:
            continue
        children = [key.get_child(model, part) for model in key.models if part in model.model_fields]
        if not children:
            names = sorted({".".join(map(str, other)) for other in iter_keys(root.models[0])})
            hint = suggest(path, names, "--help lists the sections")
            raise ConfigInvalid(f"there is no key {path!r}; {hint}", key="--help")
        key = replace(children[0], options=[option for child in children for option in child.options])
    return key


def format_section(key: HelpKey) -> Iterator[str]:
    """Yield the line of a plain key, or the lines of every key of a section, variant by variant."""
    if not key.models:
        yield from _format_key(key, key.text)
    for section in iter_sections(key):
        variant = f" with {section.variant}" if section.variant else ""
        summary = _first_sentence(inspect.getdoc(section.model) or "")
        yield from ("", f"{section.path}{variant}: {summary}".removeprefix(": "))
        for child in section.keys:
            yield from _format_key(child, child.text)


def _format_key(key: HelpKey, text: str) -> list[str]:
    """Return the lines of one key: its flag, the text and its default."""
    flag = f"  --{key.path} {'|'.join(dict.fromkeys(map(format_type, key.options)))}"
    return _format_columns(flag, " ".join(filter(None, [text, format_default(key.default)])))


def _format_columns(flag: str, text: str) -> list[str]:
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    indent = " " * FLAG_WIDTH
    lines = textwrap.wrap(text, max(20, width - FLAG_WIDTH)) or [""]
    if len(flag) >= FLAG_WIDTH:
        return [flag, *(f"{indent}{line}".rstrip() for line in lines if line)]
    return [f"{flag:<{FLAG_WIDTH}}{lines[0]}".rstrip(), *(f"{indent}{line}" for line in lines[1:])]


def format_default(default: Any) -> str:
    """Return a default value in brackets, or an empty text for a section or an empty value."""
    if default is PydanticUndefined:
        return "(required)"
    if isinstance(default, BaseModel) or default in ("", [], {}, ()):
        return ""
    return f"({'true' if default is True else 'false' if default is False else default})"


def format_type(option: Any) -> str:
    """Return what may stand at a key: a kind of value, or the values themselves."""
    if get_origin(option) is Literal:
        return "|".join(map(str, get_args(option)))
    if is_list_type(option):
        return "LIST"
    return "TABLE" if is_dict_type(option) or is_model_type(option) else TYPE_NAMES.get(option, "TEXT")


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a key holds, itself or as entries of a list or table."""
    models: list[type[BaseModel]] = []
    for option in annotation_options(annotation):
        if is_model_type(option):
            models.append(option)
        elif is_list_type(option) or is_dict_type(option):
            models += [model for element in element_options(option) for model in _find_models(element)]
    return models


def _find_tags(model: type[BaseModel]) -> list[str]:
    return [repr(tag) for tag in get_args(model.model_fields[model_tag_key(model)].annotation)]


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
    return f"{sentence}." if sentence else ""


@cache
def _read_key_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the string below each field of a section, or its entry in the docstring, its base classes included."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not is_model_type(cls) or cls is BaseModel:
            continue
        for names, text in DOCSTRING_ENTRY.findall(inspect.cleandoc(cls.__doc__ or "")):
            texts |= dict.fromkeys(re.findall(r"\w+", names), " ".join(f"{text[0].upper()}{text[1:]}".split()))
        for field, text in itertools.pairwise(_parse_classes(cls.__module__).get(cls.__name__, ())):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


@cache
def _parse_classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module; none if it has no source, as one that is created at run time."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
