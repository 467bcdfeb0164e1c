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

from ramify.config.layers import ConfigLayers
from ramify.config.schema import (
    KeyPath,
    child_options,
    format_key,
    has_key,
    is_dict,
    is_list,
    iter_keys,
    section_keys,
    select_variant,
    union_tag_key,
    variant_tags,
)

MAX_VALUE_CHARS = 80  # characters of a value that are shown


def explain_errors(error: ValidationError, layers: ConfigLayers, command_flags: Sequence[str] = ()) -> dict[str, str]:
    """Key to problem, one per key: the arms of a union complain separately about one value.

    `command_flags` are flags of the command that are not keys; an unknown flag may be a misspelling of one of them.
    """
    expected: dict[KeyPath, list[str]] = {}
    found: dict[KeyPath, str] = {}
    for finding in error.errors(include_url=False):
        key = _locate_key(finding["loc"], layers.data, missing=finding["type"] == "missing")
        match finding["type"]:
            case "extra_forbidden":
                expectation = f"unknown {_describe_unknown(key, layers)}; {_suggest_key(key, layers, command_flags)}"
            case "missing":
                expectation = "required, but not given"
            case "union_tag_invalid" | "union_tag_not_found":
                kinds, table = _options_and_data(key, layers)
                expectation = "expected " + " or ".join(map(repr, variant_tags(kinds)))
                key = (*key, union_tag_key(kinds))
                found[key] = _format_value(table.get(key[-1]))
            case "value_error":
                expectation = str(finding.get("ctx", {}).get("error", finding["msg"]))
            case "model_type" | "model_attributes_type" | "dict_type":
                expectation, found[key] = "expected a section", _format_value(finding["input"])
            case _:
                expectation = finding["msg"].replace("Input should be", "expected").split(", unable to parse")[0]
                found[key] = _format_value(finding["input"])
        expected.setdefault(key, [])
        if expectation not in expected[key]:
            expected[key].append(expectation)
    return {
        format_key(key): _format_problem(parts, found.get(key), _find_origin(key, parts, layers))
        for key, parts in expected.items()
    }


def _describe_unknown(key: KeyPath, layers: ConfigLayers) -> str:
    """Return what an unknown key is called: its flag, if a flag set it and no variant of the section has that key."""
    return (
        f"flag {layers.find_origin(key)}" if _is_flag(key, layers) and not _belongs_to_variant(key, layers) else "key"
    )


def _belongs_to_variant(key: KeyPath, layers: ConfigLayers) -> bool:
    return bool(reduce(child_options, key, [layers.cls]))


def _is_flag(key: KeyPath, layers: ConfigLayers) -> bool:
    return (layers.find_origin(key) or "").startswith("--")


def _find_origin(key: KeyPath, expectations: list[str], layers: ConfigLayers) -> str | None:
    """Return what set the value; None if the problem names the flag already."""
    return None if expectations[0].startswith("unknown flag") else layers.find_origin(key)


def _format_problem(expectations: list[str], found: str | None, origin: str | None) -> str:
    said = expectations[0] + "".join(f" or {part.removeprefix('expected ')}" for part in expectations[1:])
    return said + (f", got {found}" if found else "") + (f" ({origin})" if origin else "")


def _locate_key(location: Sequence[str | int], data: Any, *, missing: bool) -> KeyPath:
    """The key in the data. What is not in the data is a label of pydantic's, or the key that is missing."""
    key: KeyPath = ()
    for position, part in enumerate(location):
        if has_key(data, part):
            key, data = (*key, part), data[part]
        elif missing and position + 1 == len(location):
            key = (*key, part)
    return key


def _options_and_data(key: KeyPath, layers: ConfigLayers) -> tuple[list[Any], Any]:
    """The options the schema has at `key`, as the data chose among them, and the data there."""
    kinds: list[Any] = [layers.cls]
    node: Any = layers.data
    for part in key:
        kinds, node = child_options(kinds, part), node[part]
        kinds = select_variant(kinds, node)
    return kinds, node


def _suggest_key(key: KeyPath, layers: ConfigLayers, command_flags: Sequence[str]) -> str:
    """The key probably meant: alike in the same section, or else of that name elsewhere."""
    *section, name = key
    kinds, table = _options_and_data(tuple(section), layers)
    here = section_keys(kinds)
    if _belongs_to_variant(key, layers):  # some variant has this key, but not the chosen one
        tag = union_tag_key(kinds)
        if tag not in table:  # the variant was left to the default
            owners = variant_tags([kind for kind in kinds if child_options([kind], name)])
            return f"it needs {format_key((*section, tag))} = {' or '.join(map(repr, owners))}"
        return f"{format_key(section)} with {tag} = {table[tag]!r} has {', '.join(here)}"
    dashes = "--" if _is_flag(key, layers) else ""
    switches = [flag.removeprefix("--") for flag in command_flags] if dashes and not section else []
    if alike := difflib.get_close_matches(str(name), [*switches, *here], n=1, cutoff=0.6):
        return f"did you mean {dashes}{format_key((*section, alike[0]))}?"
    elsewhere = {str(other[-1]): other for other in reversed(list(iter_keys(layers.cls)))}
    if alike := difflib.get_close_matches(str(name), elsewhere, n=1, cutoff=0.8):
        return f"did you mean {dashes}{format_key(elsewhere[alike[0]])}?"
    return f"valid here: {', '.join([*switches, *here])}"


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if is_dict(value) or is_list(value):
        return "a table" if is_dict(value) else "a list"
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
