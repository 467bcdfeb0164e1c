"""From pydantic's findings to sentences a person can act on.

Pydantic reports where its validators were, labels of union arms included; people know keys. So each finding is led back
to the key as it stands in the data, and says what was expected, what was found, who set it, and for a key that does not
exist, which one was probably meant.
"""

import difflib
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import ValidationError

from ramify.config.layers import Layers
from ramify.config.schema import Key, dotted, every_key, has, is_array, is_dict, siblings, step, tag_of, tags, variant

LONGEST = 80  # characters of a value that are shown


def explain(error: ValidationError, layers: Layers, command_flags: Sequence[str] = ()) -> dict[str, str]:
    """Key to problem, one per key: the arms of a union complain separately about one value.

    `command_flags` are flags of the command that are not keys; an unknown flag may be a misspelling of one of them.
    """
    expected: dict[Key, list[str]] = {}
    found: dict[Key, str] = {}
    for finding in error.errors(include_url=False):
        key = _key(finding["loc"], layers.data, missing=finding["type"] == "missing")
        match finding["type"]:
            case "extra_forbidden":
                expectation = f"unknown {_describe_unknown(key, layers)}; {_nearest(key, layers, command_flags)}"
            case "missing":
                expectation = "required, but not given"
            case "union_tag_invalid" | "union_tag_not_found":
                kinds, table = _at(key, layers)
                expectation = "expected " + " or ".join(map(repr, tags(kinds)))
                key = (*key, tag_of(kinds))
                found[key] = _shown(table.get(key[-1]))
            case "value_error":
                expectation = str(finding.get("ctx", {}).get("error", finding["msg"]))
            case "model_type" | "model_attributes_type" | "dict_type":
                expectation, found[key] = "expected a section", _shown(finding["input"])
            case _:
                expectation = finding["msg"].replace("Input should be", "expected").split(", unable to parse")[0]
                found[key] = _shown(finding["input"])
        expected.setdefault(key, [])
        if expectation not in expected[key]:
            expected[key].append(expectation)
    return {
        dotted(key): _sentence(parts, found.get(key), _origin(key, parts, layers)) for key, parts in expected.items()
    }


def _describe_unknown(key: Key, layers: Layers) -> str:
    """Return what an unknown key is called: its flag, if a flag set it and no variant of the section has that key."""
    return f"flag {layers.origin(key)}" if _is_flag(key, layers) and not _belongs_to_a_variant(key, layers) else "key"


def _belongs_to_a_variant(key: Key, layers: Layers) -> bool:
    return bool(reduce(step, key, [layers.cls]))


def _is_flag(key: Key, layers: Layers) -> bool:
    return (layers.origin(key) or "").startswith("--")


def _origin(key: Key, parts: list[str], layers: Layers) -> str | None:
    """Return what set the value; None if the problem names the flag already."""
    return None if parts[0].startswith("unknown flag") else layers.origin(key)


def _sentence(parts: list[str], found: str | None, origin: str | None) -> str:
    said = parts[0] + "".join(f" or {part.removeprefix('expected ')}" for part in parts[1:])
    return said + (f", got {found}" if found else "") + (f" ({origin})" if origin else "")


def _key(location: Sequence[str | int], data: Any, *, missing: bool) -> Key:
    """The key in the data. What is not in the data is a label of pydantic's, or the key that is missing."""
    key: Key = ()
    for position, part in enumerate(location):
        if has(data, part):
            key, data = (*key, part), data[part]
        elif missing and position + 1 == len(location):
            key = (*key, part)
    return key


def _at(key: Key, layers: Layers) -> tuple[list[Any], Any]:
    """The options the schema has at `key`, as the data chose among them, and the data there."""
    kinds: list[Any] = [layers.cls]
    node: Any = layers.data
    for part in key:
        kinds, node = step(kinds, part), node[part]
        kinds = variant(kinds, node)
    return kinds, node


def _nearest(key: Key, layers: Layers, command_flags: Sequence[str]) -> str:
    """The key probably meant: alike in the same section, or else of that name elsewhere."""
    *section, name = key
    kinds, table = _at(tuple(section), layers)
    here = siblings(kinds)
    if _belongs_to_a_variant(key, layers):  # some variant has this key, but not the chosen one
        tag = tag_of(kinds)
        if tag not in table:  # the variant was left to the default
            owners = tags([kind for kind in kinds if step([kind], name)])
            return f"it needs {dotted((*section, tag))} = {' or '.join(map(repr, owners))}"
        return f"{dotted(section)} with {tag} = {table[tag]!r} has {', '.join(here)}"
    dashes = "--" if _is_flag(key, layers) else ""
    switches = [flag.removeprefix("--") for flag in command_flags] if dashes and not section else []
    if alike := difflib.get_close_matches(str(name), [*switches, *here], n=1, cutoff=0.6):
        return f"did you mean {dashes}{dotted((*section, alike[0]))}?"
    elsewhere = {str(other[-1]): other for other in reversed(list(every_key(layers.cls)))}
    if alike := difflib.get_close_matches(str(name), elsewhere, n=1, cutoff=0.8):
        return f"did you mean {dashes}{dotted(elsewhere[alike[0]])}?"
    return f"valid here: {', '.join([*switches, *here])}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if is_dict(value) or is_array(value):
        return "a table" if is_dict(value) else "a list"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
