"""The command line as a list of files and flags, and the values of a flag as the value of its key.

The meaning of a flag's values depends on the type of its key: `--tags a b` is a list, `--compile` a switch, `--name 7`
the text "7". Values of a definite type are passed to the model as text. Where the schema does not determine the type
(plugin tables, `Any`, lists and sections given as one value), a value is parsed as JSON, or taken as text if it is not
JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ramify.core.config.hints import find_file_hint
from ramify.core.config.schema import child_options, element_options, is_container, is_list, is_list_type, is_model_type
from ramify.core.errors import ConfigInvalid, ConfigProblem


@dataclass(frozen=True, slots=True)
class FileArgument:
    """`@ run.toml`, or `--section @ part.toml`."""

    section: tuple[str, ...]
    filename: str


@dataclass(frozen=True, slots=True)
class FlagArgument:
    """`--path.to.key value ...`."""

    path: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The flag as it was written."""
        return "--" + ".".join(self.path)


Argument = FileArgument | FlagArgument | ConfigProblem  # a problem is an argument that cannot be used


def split_arguments(cls: type, args: Sequence[str]) -> list[Argument]:
    """Return the arguments in order. A word that starts with `--` or `@` ends a flag; `--key=value` takes any value."""
    arguments: list[Argument] = []
    remaining = list(args)
    while remaining:
        token = remaining.pop(0)
        if token.startswith("@"):
            arguments.append(_file_argument((), token, remaining))
        elif is_short_flag(token):
            while remaining and not remaining[0].startswith(("--", "@")):
                remaining.pop(0)
            arguments.append(ConfigProblem("", f"unknown flag {token}; --help lists the flags"))
        elif token == "--" or not token.startswith("--"):
            hint = find_file_hint(token) or "a file is '@ FILE', a flag '--key value'"
            arguments.append(ConfigProblem("", f"unexpected argument {token!r}: {hint}"))
        else:
            name, equals, value = token[2:].partition("=")
            path = tuple(name.split("."))
            values = [value] if equals else []
            options = options_at(cls, path)
            takes_many = not options or any(map(is_list_type, options))
            while not equals and remaining and not remaining[0].startswith(("--", "@")):
                if values and not takes_many and is_short_flag(remaining[0]):
                    break
                values.append(remaining.pop(0))
            if not values and not equals and remaining and remaining[0].startswith("@") and not is_switch(options):
                arguments.append(_file_argument(path, remaining.pop(0), remaining))
            else:
                arguments.append(FlagArgument(path, tuple(values)))
    return arguments


def is_short_flag(word: str) -> bool:
    """Return whether a word looks like `-z`; -1 and -.5 are numbers."""
    return len(word) > 1 and word[0] == "-" and word[1].isalpha()


def _file_argument(section: tuple[str, ...], token: str, remaining: list[str]) -> FileArgument | ConfigProblem:
    if token != "@":
        return FileArgument(section, token[1:])
    return FileArgument(section, remaining.pop(0)) if remaining else ConfigProblem(".".join(section), "@ needs a file")


def options_at(cls: type, path: Sequence[str]) -> list[Any]:
    """Return the options at the path of a flag."""
    options: list[Any] = [cls]
    for part in path:
        options = child_options(options, normalize_key(options, part))
    return options


def normalize_key(options: Sequence[Any], part: str) -> str:
    """Return a part of a flag as a key: `max-steps` is `max_steps` in a section, and unchanged in other tables."""
    return part.replace("-", "_") if any(map(is_model_type, options)) else part


def is_switch(options: Sequence[Any]) -> bool:
    """Return whether the key is boolean, so that its flag needs no value."""
    return bool in options and set(options) <= {bool, NoneType}


def parse_value(key: str, options: Sequence[Any], values: Sequence[str]) -> Any:
    """Return the values of a flag as the value of a key with these options. Raises ConfigInvalid."""
    options = [option for option in options if option is not NoneType] if NoneType in options else options
    lists = [option for option in options if is_list_type(option)]
    if not values:
        if is_switch(options) or not options:
            return True
        if any(is_model_type(option) for option in options):
            return {}  # `--wandb`: the section with its defaults
        raise ConfigInvalid("needs a value" + (f" (an empty list is --{key}=[])" if lists else ""), key=key)
    if lists:
        parsed = _json_or_text(values[0]) if len(values) == 1 else None
        if is_list(parsed):
            return parsed
        if len(values) > 1 or len(lists) == len(options):
            return [parse_value(key, element_options(lists[0]), [value]) for value in values]
    if len(values) > 1 and options:
        raise ConfigInvalid(f"takes one value, got {' '.join(map(repr, values))}", key=key)
    if not options:
        return list(values) if len(values) > 1 else values[0]
    return _json_or_text(values[0]) if _is_ambiguous(options) else values[0]


def _is_ambiguous(options: Sequence[Any]) -> bool:
    """Return whether the model could not infer the type from text alone."""
    return (str in options and len(options) > 1) or any(map(is_container, options))


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value, parse_constant=str)  # NaN and Infinity are not JSON and stay text
    except ValueError:
        return value
