"""Pydantic's validation errors as one message per key.

Pydantic reports the location of its validators, including labels of union members; users know keys. So each error is
mapped to its key in the data. The message says what was expected, what was given, which file or flag set it, and for an
unknown key which one was probably meant.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import ValidationError

from ramify.core.config.base import SectionProblems
from ramify.core.config.layers import ConfigLayers, find_key_hint
from ramify.core.config.schema import (
    KeyPath,
    child_options,
    format_key,
    get_misplaced_keys,
    has_key,
    is_dict,
    is_list,
    is_model_type,
    iter_keys,
    parse_key,
    section_keys,
    select_variant,
    union_tag_key,
    variant_tags,
)
from ramify.core.errors import ConfigProblem
from ramify.core.names import find_similar

MAX_VALUE_CHARS = 80  # of a value in a message


def explain_errors(
    error: ValidationError, layers: ConfigLayers, command_flags: Sequence[str] = ()
) -> list[ConfigProblem]:
    """Return one problem per key; the errors that the members of a union report for one value are joined with "or".

    `command_flags` are flags of the command that are not keys; they are suggested for misspelt flags.
    """
    expectations: dict[KeyPath, list[str]] = {}
    given: dict[KeyPath, str] = {}

    def add(key: KeyPath, expectation: str) -> None:
        texts = expectations.setdefault(layers.find_given_key(key), [])
        if expectation not in texts:
            texts.append(expectation)

    for details in error.errors(include_url=False):
        key = _locate_key(details["loc"], layers.data, missing=details["type"] == "missing")
        match details["type"]:
            case "extra_forbidden":
                expectation = f"unknown {_describe_unknown(key, layers)}; {_suggest_key(key, layers, command_flags)}"
            case "missing":
                expectation = "required, but not given"
            case "union_tag_invalid" | "union_tag_not_found":
                options, table = _options_and_data(key, layers)
                expectation = "expected " + " or ".join(map(repr, variant_tags(options)))
                key = (*key, union_tag_key(options))
                given[key] = _format_value(table.get(key[-1]))
            case "value_error":
                cause = details.get("ctx", {}).get("error", details["msg"])
                rules: dict[KeyPath, list[str]] = {}
                problems = cause.problems if isinstance(cause, SectionProblems) else [ConfigProblem("", str(cause))]
                for problem in problems:
                    rules.setdefault((*key, *parse_key(problem.key)), []).append(problem.text)
                for rule_key, texts in rules.items():
                    add(rule_key, "; ".join(texts))
                continue
            case "list_type" if is_dict(details["input"]):
                brackets = f"[[{format_key(key)}]]"
                expectation, given[key] = f"expected a list of tables, each written as {brackets}", "one table"
            case "model_type" | "model_attributes_type" | "dict_type":
                expectation, given[key] = "expected a table", _format_value(details["input"])
            case _:
                expectation = details["msg"].replace("Input should be", "expected").split(", unable to parse")[0]
                given[key] = _format_value(details["input"])
        add(key, expectation)
    return [
        ConfigProblem(format_key(key), _join_expectations(parts, given.get(key)), _find_origin(key, parts, layers))
        for key, parts in expectations.items()
    ]


def _describe_unknown(key: KeyPath, layers: ConfigLayers) -> str:
    """Return "flag --x" for an unknown key that a flag set and that no variant of the section has; else "key"."""
    is_unknown_flag = _is_flag(key, layers) and not _belongs_to_variant(key, layers)
    return f"flag {layers.find_origin(key)}" if is_unknown_flag else "key"


def _belongs_to_variant(key: KeyPath, layers: ConfigLayers) -> bool:
    return bool(reduce(child_options, key, [layers.cls]))


def _is_flag(key: KeyPath, layers: ConfigLayers) -> bool:
    return layers.find_origin(key).startswith("--")


def _find_origin(key: KeyPath, expectations: list[str], layers: ConfigLayers) -> str:
    """Return the file or flag that set the value; "" if the message already names the flag."""
    return "" if expectations[0].startswith("unknown flag") else layers.find_origin(key)


def _join_expectations(expectations: list[str], given: str | None) -> str:
    message = expectations[0] + "".join(f" or {part.removeprefix('expected ')}" for part in expectations[1:])
    return message + (f", got {given}" if given else "")


def _locate_key(location: Sequence[str | int], data: Any, *, missing: bool) -> KeyPath:
    """Return the key in the data. Parts that are not in the data are pydantic's labels, or the missing key."""
    key: KeyPath = ()
    for position, part in enumerate(location):
        if has_key(data, part):
            key, data = (*key, part), data[part]
        elif missing and position + 1 == len(location):
            key = (*key, part)
    return key


def _options_and_data(key: KeyPath, layers: ConfigLayers) -> tuple[list[Any], Any]:
    """Return the options at `key`, narrowed to the variant that the data selects, and the data there."""
    options: list[Any] = [layers.cls]
    node: Any = layers.data
    for part in key:
        options, node = child_options(options, part), node[part]
        options = select_variant(options, node)
    return options, node


def _suggest_key(key: KeyPath, layers: ConfigLayers, command_flags: Sequence[str]) -> str:
    """Return a hint: a similar key in the same section, or else one elsewhere, or else the valid keys."""
    *section, name = key
    options, table = _options_and_data(tuple(section), layers)
    valid_keys = section_keys(options)
    if _belongs_to_variant(key, layers):  # some variant has this key, but not the chosen one
        tag = union_tag_key(options)
        if tag not in table:  # the default variant
            owners = variant_tags([option for option in options if child_options([option], name)])
            return f"it needs {format_key((*section, tag))} = {' or '.join(map(repr, owners))}"
        return f"{format_key(section)} with {tag} = {table[tag]!r} has {', '.join(valid_keys)}"
    dashes = "--" if _is_flag(key, layers) else ""
    if dashes and not section:
        valid_keys = [*(flag.removeprefix("--") for flag in command_flags), *valid_keys]
    models = [option for option in options if is_model_type(option)]
    places = {key: place for model in models for key, place in get_misplaced_keys(model).items()}
    if place := places.get(str(name)):
        return f"did you mean {dashes}{format_key((*section, place))}?"
    if name == "config" and dashes:
        return f"a file is given as '@ {table[name]}'"
    if hint := find_key_hint(layers.cls, str(name)):
        return f"did you mean {'' if ' = ' in hint else dashes}{hint}?"
    if similar := find_similar(str(name), valid_keys):
        return f"did you mean {dashes}{format_key((*section, similar))}?"
    elsewhere = {str(other[-1]): other for other in reversed(list(iter_keys(layers.cls)))}
    if similar := find_similar(str(name), elsewhere, cutoff=0.8):
        if section and len(elsewhere[similar]) == 1 and not dashes:  # in a file, "did you mean" would repeat the name
            return f"{similar} is a key of the top level; valid here: {', '.join(valid_keys)}"
        return f"did you mean {dashes}{format_key(elsewhere[similar])}?"
    return f"valid here: {', '.join(valid_keys)}"


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if is_dict(value) or is_list(value):
        return "a table" if is_dict(value) else "a list"
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
