"""The command line as a list of files and flags, and the words of a flag as a value.

What a flag's words mean depends on what its key takes: `--tags a b` is a list, `--compile` a switch, `--name 7` the
text "7". Everything typed is left as text for the model to judge; only where the schema leaves the type open (plugin
tables, `Any`, whole lists and sections) is a word read as JSON, and as text if it is not JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ramify.config.schema import child_options, element_options, is_container, is_list, is_list_type, is_model_type


class ArgumentProblem(Exception):
    """A file or flag that cannot become part of the configuration, under the key it was meant for."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason


@dataclass(frozen=True, slots=True)
class FileArgument:
    """`@ run.toml`, or `--section @ part.toml`."""

    section: tuple[str, ...]
    filename: str


@dataclass(frozen=True, slots=True)
class FlagArgument:
    """`--path.to.key words`."""

    path: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The flag as it was written."""
        return "--" + ".".join(self.path)


Argument = FileArgument | FlagArgument | ArgumentProblem


def split_arguments(cls: type, args: Sequence[str]) -> list[Argument]:
    """The arguments in order. A word that starts with `--` or `@` ends a flag; `--key=word` takes any word."""
    found: list[Argument] = []
    rest = list(args)
    while rest:
        token = rest.pop(0)
        if token.startswith("@"):
            found.append(_file_argument((), token, rest))
        elif is_short_flag(token):
            while rest and not rest[0].startswith(("--", "@")):
                rest.pop(0)
            found.append(ArgumentProblem("", f"unknown flag {token}; --help lists the flags"))
        elif token == "--" or not token.startswith("--"):
            found.append(
                ArgumentProblem("", f"unexpected argument {token!r}: a file is '@ FILE', a flag '--key value'")
            )
        else:
            name, equals, word = token[2:].partition("=")
            path = tuple(name.split("."))
            words = [word] if equals else []
            kinds = options_at(cls, path)
            takes_many = not kinds or any(map(is_list_type, kinds))
            while not equals and rest and not rest[0].startswith(("--", "@")):
                if words and not takes_many and is_short_flag(rest[0]):
                    break
                words.append(rest.pop(0))
            if not words and not equals and rest and rest[0].startswith("@") and not is_switch(kinds):
                found.append(_file_argument(path, rest.pop(0), rest))
            else:
                found.append(FlagArgument(path, tuple(words)))
    return found


def is_short_flag(word: str) -> bool:
    """Whether a word looks like `-z`; -1 and -.5 are numbers."""
    return len(word) > 1 and word[0] == "-" and word[1].isalpha()


def _file_argument(section: tuple[str, ...], token: str, remaining: list[str]) -> FileArgument | ArgumentProblem:
    if token != "@":
        return FileArgument(section, token[1:])
    return (
        FileArgument(section, remaining.pop(0)) if remaining else ArgumentProblem(".".join(section), "@ needs a file")
    )


def options_at(cls: type, path: Sequence[str]) -> list[Any]:
    """What the schema allows at a path as written in a flag."""
    kinds: list[Any] = [cls]
    for part in path:
        kinds = child_options(kinds, normalize_key(kinds, part))
    return kinds


def normalize_key(options: Sequence[Any], part: str) -> str:
    """A part of a flag as a key: `max-steps` is `max_steps` in a section, and itself in a free table."""
    return part.replace("-", "_") if any(map(is_model_type, options)) else part


def is_switch(options: Sequence[Any]) -> bool:
    """Whether the key is turned on by its bare flag."""
    return bool in options and set(options) <= {bool, NoneType}


def parse_value(key: str, options: Sequence[Any], values: Sequence[str]) -> Any:
    """The words of a flag as a value for a key of these kinds."""
    options = [kind for kind in options if kind is not NoneType] if NoneType in options else options
    lists = [kind for kind in options if is_list_type(kind)]
    if not values:
        if is_switch(options) or not options:
            return True
        if any(is_model_type(kind) for kind in options):
            return {}  # `--wandb`: the section with its defaults
        raise ArgumentProblem(key, "needs a value" + (f" (an empty list is --{key}=[])" if lists else ""))
    if lists:
        whole = _json_or_text(values[0]) if len(values) == 1 else None
        if is_list(whole):
            return whole
        if len(values) > 1 or len(lists) == len(options):
            return [parse_value(key, element_options(lists[0]), [word]) for word in values]
    if len(values) > 1 and options:
        raise ArgumentProblem(key, f"takes one value, got {' '.join(map(repr, values))}")
    if not options:
        return list(values) if len(values) > 1 else values[0]
    return _json_or_text(values[0]) if _is_ambiguous(options) else values[0]


def _is_ambiguous(options: Sequence[Any]) -> bool:
    """Whether text alone does not tell the model which type is meant."""
    return (str in options and len(options) > 1) or any(map(is_container, options))


def _json_or_text(word: str) -> Any:
    try:
        return json.loads(word, parse_constant=str)  # NaN and Infinity are not JSON: they stay words
    except ValueError:
        return word
