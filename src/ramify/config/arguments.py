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

from ramify.config.schema import element, is_array, is_container, is_list, is_model, step


class Unreadable(Exception):
    """A file or flag that cannot become part of the configuration, under the key it was meant for."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason


@dataclass(frozen=True, slots=True)
class File:
    """`@ run.toml`, or `--section @ part.toml`."""

    section: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Flag:
    """`--path.to.key words`."""

    path: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The flag as it was written."""
        return "--" + ".".join(self.path)


Argument = File | Flag | Unreadable


def split(cls: type, args: Sequence[str]) -> list[Argument]:
    """The arguments in order. A word that starts with `--` or `@` ends a flag; `--key=word` takes any word."""
    found: list[Argument] = []
    rest = list(args)
    while rest:
        token = rest.pop(0)
        if token.startswith("@"):
            found.append(_file((), token, rest))
        elif is_short_flag(token):
            while rest and not rest[0].startswith(("--", "@")):
                rest.pop(0)
            found.append(Unreadable("", f"unknown flag {token}; --help lists the flags"))
        elif token == "--" or not token.startswith("--"):
            found.append(Unreadable("", f"unexpected argument {token!r}: a file is '@ FILE', a flag '--key value'"))
        else:
            name, equals, word = token[2:].partition("=")
            path = tuple(name.split("."))
            words = [word] if equals else []
            kinds = kinds_at(cls, path)
            takes_many = not kinds or any(map(is_list, kinds))
            while not equals and rest and not rest[0].startswith(("--", "@")):
                if words and not takes_many and is_short_flag(rest[0]):
                    break
                words.append(rest.pop(0))
            if not words and not equals and rest and rest[0].startswith("@") and not is_switch(kinds):
                found.append(_file(path, rest.pop(0), rest))
            else:
                found.append(Flag(path, tuple(words)))
    return found


def is_short_flag(word: str) -> bool:
    """Whether a word looks like `-z`; -1 and -.5 are numbers."""
    return len(word) > 1 and word[0] == "-" and word[1].isalpha()


def _file(section: tuple[str, ...], token: str, rest: list[str]) -> File | Unreadable:
    if token != "@":
        return File(section, token[1:])
    return File(section, rest.pop(0)) if rest else Unreadable(".".join(section), "@ needs a file")


def kinds_at(cls: type, path: Sequence[str]) -> list[Any]:
    """What the schema allows at a path as written in a flag."""
    kinds: list[Any] = [cls]
    for part in path:
        kinds = step(kinds, key_of(kinds, part))
    return kinds


def key_of(kinds: Sequence[Any], part: str) -> str:
    """A part of a flag as a key: `max-steps` is `max_steps` in a section, and itself in a free table."""
    return part.replace("-", "_") if any(map(is_model, kinds)) else part


def is_switch(kinds: Sequence[Any]) -> bool:
    """Whether the key is turned on by its bare flag."""
    return bool in kinds and set(kinds) <= {bool, NoneType}


def value_of(key: str, kinds: Sequence[Any], words: Sequence[str]) -> Any:
    """The words of a flag as a value for a key of these kinds."""
    kinds = [kind for kind in kinds if kind is not NoneType] if NoneType in kinds else kinds
    lists = [kind for kind in kinds if is_list(kind)]
    if not words:
        if is_switch(kinds) or not kinds:
            return True
        if any(is_model(kind) for kind in kinds):
            return {}  # `--wandb`: the section with its defaults
        raise Unreadable(key, "needs a value" + (f" (an empty list is --{key}=[])" if lists else ""))
    if lists:
        whole = _json_or_text(words[0]) if len(words) == 1 else None
        if is_array(whole):
            return whole
        if len(words) > 1 or len(lists) == len(kinds):
            return [value_of(key, element(lists[0]), [word]) for word in words]
    if len(words) > 1 and kinds:
        raise Unreadable(key, f"takes one value, got {' '.join(map(repr, words))}")
    if not kinds:
        return list(words) if len(words) > 1 else words[0]
    return _json_or_text(words[0]) if _is_open(kinds) else words[0]


def _is_open(kinds: Sequence[Any]) -> bool:
    """Whether text alone does not tell the model which type is meant."""
    return (str in kinds and len(kinds) > 1) or any(map(is_container, kinds))


def _json_or_text(word: str) -> Any:
    try:
        return json.loads(word, parse_constant=str)  # NaN and Infinity are not JSON: they stay words
    except ValueError:
        return word
