"""The command line as files and flags, and the table that they are merged into, with the origin of each key.

Files are merged in order, and flags after all files. A file replaces a list completely. A flag may set an entry of a
list by its index; if no file sets the list, it is copied from the default first.

The meaning of a flag's values depends on the type of its key: `--tags a b` is a list, `--compile` a switch, `--name 7`
the text "7". Values of a definite type are passed to the model as text. Where the schema does not determine the type
(plugin tables, `Any`, lists and sections given as one value), a value is parsed as JSON, or taken as text if it is not
JSON.

An unknown key, a file without `@`, an unknown command or loss is looked up among the words that users know from other
trainers and tools, before a similar name is suggested.
"""

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path, PurePath
from types import NoneType
from typing import Any

from pydantic import BaseModel

from ramify.core.config.base import NONE_LITERAL, Config, merge_tables
from ramify.core.config.schema import (
    KeyPath,
    child_options,
    default_at,
    element_options,
    format_key,
    has_key,
    is_container,
    is_dict,
    is_list,
    is_list_type,
    is_model_type,
    is_tuple,
    parse_key,
    select_variant,
)
from ramify.core.errors import ConfigInvalid, ConfigProblem

HINTS_FILE = Path(__file__).with_name("hints.toml")


@cache
def load_hints(kind: str) -> dict[str, Any]:
    """Return what to write instead of words of other trainers: keys, suffixes of files, commands or losses."""
    return tomllib.loads(HINTS_FILE.read_text(encoding="utf-8"))[kind]


def find_key_hint(cls: type, name: str) -> str | None:
    """Return the key of the configuration `cls` that users of other trainers call `name`; None if there is none."""
    for hint in load_hints("keys").get(name, ()):
        if reduce(child_options, parse_key(hint.partition(" = ")[0]), [cls]):
            return hint
    return None


def find_file_hint(word: str) -> str | None:
    """Return how to write an argument that is a file of configuration or data; None for any other word."""
    hint = load_hints("files").get(PurePath(word).suffix.removeprefix("."))
    return hint and hint.replace("{}", word)


TomlTable = dict[str, Any]


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


class ConfigLayers:
    """The merged input of a configuration of class `cls`, starting from the table `base`. `data` is the result."""

    def __init__(self, cls: type[Config], base: Mapping[str, Any] | None = None) -> None:
        self.cls = cls
        self.data: TomlTable = copy.deepcopy(dict(base or {}))
        self._origins: dict[KeyPath, str] = {}

    def find_origin(self, key: KeyPath) -> str:
        """Return the file or flag that set the value at `key`; "" if none did, or several set parts of a section."""
        prefixes = (key[:length] for length in range(len(key), -1, -1))
        outer = next((self._origins[prefix] for prefix in prefixes if prefix in self._origins), None)
        origins = {origin for other, origin in self._origins.items() if other[: len(key)] == key}
        if outer is not None:
            origins.add(outer)
        return origins.pop() if len(origins) == 1 else ""

    def find_given_key(self, key: KeyPath) -> KeyPath:
        """Return the key under which a file or flag set the value that is refused at `key`."""
        return self.cls.find_given_key(key, self.data)

    def add_file(self, file: FileArgument) -> None:
        """Merge a TOML file into its section. Raises ConfigInvalid."""
        table = _read_toml(file.filename)
        if not file.section:
            self.data = merge_tables(self.data, table)
            self._record_origins((), table, file.filename)
            return
        key, container = self._resolve(file.section)
        base = container[key[-1]] if has_key(container, key[-1]) else None
        container[key[-1]] = merge_tables(base if is_dict(base) else {}, table)
        self._record_origins(key, table, file.filename)

    def add_flag(self, flag: FlagArgument) -> None:
        """Set the key of a flag. Raises ConfigInvalid."""
        path, options = flag.path, options_at(self.cls, flag.path)
        if not options and not flag.values and path[0].startswith("no-"):
            path = (path[0].removeprefix("no-"), *path[1:])
            positive = options_at(self.cls, path)
            if not is_switch(positive) and type(None) not in positive:
                problem = f"only a switch or an optional key can be negated ({flag.text})"
                raise ConfigInvalid(problem, key=format_key(flag.path))
            value: Any = False if is_switch(positive) else None
            key, container = self._resolve(path)
        else:
            key, container = self._resolve(path)
            value = parse_value(format_key(key), options, flag.values)
        container[key[-1]] = value
        self._set_origin(key, flag.text)

    def _record_origins(self, key: KeyPath, value: Any, origin: str) -> None:
        if is_dict(value) and value:
            for name, inner in value.items():
                self._record_origins((*key, name), inner, origin)
        else:
            self._set_origin(key, origin)

    def _set_origin(self, key: KeyPath, origin: str) -> None:
        self._origins = {other: origin for other, origin in self._origins.items() if other[: len(key)] != key}
        self._origins[key] = origin

    def _resolve(self, path: Sequence[str]) -> tuple[KeyPath, Any]:
        """Return the key of a flag's path, and the table or list that holds (or will hold) its value."""
        key: KeyPath = ()
        node: Any = self.data
        options: list[Any] = [self.cls]
        default: Any = None  # the default value at `key`
        for depth, part in enumerate(path):
            if is_list(node):
                name, default = _parse_index(key, part, len(node)), None
            else:
                name = normalize_key(options, part)
                default = default_at(default, select_variant(options, node), node, name)
            key, options = (*key, name), child_options(options, name)
            if depth + 1 < len(path):
                node = _descend(node, key, options, default, part=path[depth + 1])
        return key, node


def _read_toml(filename: str) -> TomlTable:
    try:
        return tomllib.loads(Path(filename).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"cannot be read: {error.strerror or error}", key=filename) from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"is not UTF-8 text (byte {error.start})", key=filename) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(f"is not TOML: {error}", key=filename) from error
    except RecursionError as error:
        raise ConfigInvalid("is nested too deeply", key=filename) from error
    except ValueError as error:  # a NUL character in the name
        raise ConfigInvalid(f"cannot be read: {error}", key=repr(filename)) from error


def _parse_index(key: KeyPath, part: str, size: int) -> int:
    if not part.isdecimal():
        raise ConfigInvalid(f"entries of {format_key(key)} are numbered from 0", key=f"{format_key(key)}.{part}")
    if int(part) >= size:
        entries = f"{size} entries (0 to {size - 1})" if size > 1 else "1 entry (0)" if size else "no entries"
        reason = f"{format_key(key)} has {entries}; a file, or --{format_key(key)} with a JSON list, can add more"
        raise ConfigInvalid(reason, key=f"{format_key(key)}.{part}")
    return int(part)


def _descend(container: Any, key: KeyPath, options: Sequence[Any], default: Any, *, part: str) -> Any:
    """Return the table or list at `key`, and create it if it is not set. Raises ConfigInvalid for other values."""
    child: Any = container[key[-1]] if has_key(container, key[-1]) else None
    if (child is None or child == NONE_LITERAL) and (not options or any(map(is_container, options))):
        is_entry = any(map(is_list_type, options)) and (part.isdecimal() or not any(map(is_model_type, options)))
        child = _copy_list(default) if is_entry else {}
        container[key[-1]] = child
    if not is_dict(child) and not is_list(child):
        raise ConfigInvalid(f"{format_key(key)} is a value, not a section", key=f"{format_key(key)}.{part}")
    return child


def _copy_list(default: Any) -> list[Any]:
    entries = list(default) if is_list(default) or is_tuple(default) else []
    return [entry.model_dump() if isinstance(entry, BaseModel) else copy.deepcopy(entry) for entry in entries]
