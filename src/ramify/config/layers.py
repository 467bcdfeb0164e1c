"""The one table that files and flags are laid into, and the memory of who set what.

Files are merged in their order, flags come after all files. A list is replaced as a whole by a file, but a flag may
reach into it by index, so the list it reaches into has to be there: from a file, or else copied from the default.
"""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ramify.config.arguments import File, Flag, Unreadable, is_switch, key_of, kinds_at, value_of
from ramify.config.base import NONE, merge
from ramify.config.schema import (
    Key,
    dotted,
    has,
    is_array,
    is_container,
    is_dict,
    is_list,
    is_model,
    is_tuple,
    step,
    tag_key,
    variant,
)

Table = dict[str, Any]


class Layers:
    """What has been said so far, `under` first, on top of the defaults of `cls`."""

    def __init__(self, cls: type[BaseModel], under: Mapping[str, Any] | None = None) -> None:
        self.cls = cls
        self.data: Table = copy.deepcopy(dict(under or {}))
        self._origins: dict[Key, str] = {}

    def origin(self, key: Key) -> str | None:
        """The file or flag that set the value at `key`; of a section, if one alone set all that is said in it."""
        known = (self._origins.get(key[:length]) for length in range(len(key), -1, -1))
        above = next((origin for origin in known if origin is not None), None)
        below = {origin for at, origin in self._origins.items() if at[: len(key)] == key}
        return above or (below.pop() if len(below) == 1 else None)

    def add_file(self, file: File) -> None:
        """Merge a TOML file into the section it was given for."""
        table = _read(file.name)
        if not file.section:
            self.data = merge(self.data, table)
            self._remember((), table, file.name)
            return
        key, holder = self._reach(file.section)
        under = holder[key[-1]] if has(holder, key[-1]) else None
        holder[key[-1]] = merge(under if is_dict(under) else {}, table)
        self._remember(key, table, file.name)

    def add_flag(self, flag: Flag) -> None:
        """Set the key a flag names."""
        path, kinds = flag.path, kinds_at(self.cls, flag.path)
        if not kinds and not flag.words and path[0].startswith("no-"):
            path = (path[0].removeprefix("no-"), *path[1:])
            positive = kinds_at(self.cls, path)
            if not is_switch(positive) and type(None) not in positive:
                raise Unreadable(dotted(flag.path), f"only a switch or an optional key can be negated ({flag.text})")
            value: Any = False if is_switch(positive) else None
            key, holder = self._reach(path)
        else:
            key, holder = self._reach(path)
            value = value_of(dotted(key), kinds, flag.words)
        holder[key[-1]] = value
        self._set_origin(key, flag.text)

    def _remember(self, key: Key, value: Any, origin: str) -> None:
        if is_dict(value) and value:
            for name, inner in value.items():
                self._remember((*key, name), inner, origin)
        else:
            self._set_origin(key, origin)

    def _set_origin(self, key: Key, origin: str) -> None:
        self._origins = {at: other for at, other in self._origins.items() if at[: len(key)] != key}
        self._origins[key] = origin

    def _reach(self, path: Sequence[str]) -> tuple[Key, Any]:
        """The key a path means, and the table or list that holds (or will hold) its value."""
        key: Key = ()
        node: Any = self.data
        kinds: list[Any] = [self.cls]
        standing: Any = None  # the default that holds where the data is silent
        for depth, part in enumerate(path):
            if is_array(node):
                name, standing = _index(key, part, len(node)), None
            else:
                name = key_of(kinds, part)
                standing = _default(standing, variant(kinds, node), node, name)
            key, kinds = (*key, name), step(kinds, name)
            if depth + 1 < len(path):
                node = _enter(node, key, kinds, standing, part=path[depth + 1])
        return key, node


def _read(name: str) -> Table:
    try:
        return tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(name, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(name, f"is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(name, f"is not TOML: {error}") from error


def _index(key: Key, part: str, size: int) -> int:
    if not part.isdecimal():
        raise Unreadable(f"{dotted(key)}.{part}", f"entries of {dotted(key)} are numbered from 0")
    if int(part) >= size:
        entries = f"{size} entries (0 to {size - 1})" if size > 1 else "1 entry (0)" if size else "no entries"
        reason = f"{dotted(key)} has {entries}; a file, or --{dotted(key)} with a JSON list, can add more"
        raise Unreadable(f"{dotted(key)}.{part}", reason)
    return int(part)


def _enter(holder: Any, key: Key, kinds: Sequence[Any], standing: Any, *, part: str) -> Any:
    """The table or list at `key`, made on the way if nobody has said anything there yet."""
    inside = holder[key[-1]] if has(holder, key[-1]) else None
    if (inside is None or inside == NONE) and (not kinds or any(map(is_container, kinds))):
        fresh: list[Any] | Table = _copy(standing) if any(map(is_list, kinds)) else {}
        holder[key[-1]] = inside = fresh
    if not is_dict(inside) and not is_array(inside):
        raise Unreadable(f"{dotted(key)}.{part}", f"{dotted(key)} is a value, not a section")
    return inside


def _default(standing: Any, kinds: Sequence[Any], table: Any, name: str) -> Any:
    """What `name` is by default: as the default of its section says, else as the class of the section says."""
    if isinstance(standing, BaseModel):
        key = tag_key(type(standing))
        tag = getattr(standing, key, None)
        if table.get(key, tag) == tag:
            return getattr(standing, name, None)
    for kind in kinds:
        field = kind.model_fields.get(name) if is_model(kind) else None
        if field is not None and not field.default_factory_takes_validated_data:
            return field.get_default(call_default_factory=True, validated_data=None)
    return None


def _copy(standing: Any) -> list[Any]:
    entries = list(standing) if is_array(standing) or is_tuple(standing) else []
    return [entry.model_dump() if isinstance(entry, BaseModel) else copy.deepcopy(entry) for entry in entries]
