"""Parse the arguments of a command into its configuration, or raise one error with all wrong keys and values.

Pydantic reports the location of its validators, including labels of union members; users know keys. So each error is
mapped to its key in the data. The message says what was expected, what was given, which file or flag set it, and for an
unknown key which one was probably meant.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from ramify.core.config.base import Config, SectionProblems
from ramify.core.config.help import format_help
from ramify.core.config.layers import Argument, ConfigLayers, FileArgument, FlagArgument, find_key_hint, split_arguments
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
from ramify.core.errors import ConfigInvalid, ConfigProblem
from ramify.core.names import find_similar

MAX_VALUE_CHARS = 80  # of a value in a message
CLEARLY_SIMILAR = 0.8  # how similar a key elsewhere must be to be suggested
C = TypeVar("C", bound=Config)
P = TypeVar("P", bound=Config)


def parse(
    cls: type[C], args: Sequence[str], *, prog: str | None = None, usage: str = "", command_flags: Sequence[str] = ()
) -> C:
    """Return the configuration from `args` (`@ file.toml ... --key value ...`) over the defaults of `cls`.

    `command_flags` are flags that the command handles itself, outside the configuration; they are suggested for
    misspelt flags. Raises ConfigInvalid with every problem. `--help` prints `usage` and the keys, and exits.
    """
    return _build_config(cls, _parse_arguments(cls, args, prog=prog, usage=usage), command_flags=command_flags)


def parse_component(
    cls: type[C],
    args: Sequence[str],
    parent_cls: type[P],
    extract: Callable[[P], Mapping[str, Any]],
    *,
    prog: str | None = None,
    usage: str = "",
    command_flags: Sequence[str] = (),
) -> tuple[C, P | None]:
    """Return the configuration of a component of a run, and the run's configuration if the files are the run's.

    If a file has a key that only `parent_cls`, the configuration of a whole run, has, the files are validated as that.
    `extract` returns the component's table from it, and flags, which are always the component's own, apply on top.
    """
    arguments = _parse_arguments(cls, args, prog=prog, usage=usage)
    files = [argument for argument in arguments if isinstance(argument, FileArgument) and not argument.section]
    if not (read_top_level_keys(cls, args) - set(cls.model_fields)) & set(parent_cls.model_fields):
        return _build_config(cls, arguments, command_flags=command_flags), None
    parent = _build_config(parent_cls, files)
    others = [argument for argument in arguments if argument not in files]
    return _build_config(cls, others, extract(parent), command_flags=command_flags), parent


def read_top_level_keys(cls: type[Config], args: Sequence[str]) -> set[str]:
    """Return the top-level keys of the files in `args`; an empty set if one cannot be read, which `parse` reports."""
    layers, arguments = ConfigLayers(Config), split_arguments(cls, args)
    files = [file for file in arguments if isinstance(file, FileArgument) and not file.section]
    return set() if _apply_each(layers.add_file, files) else set(layers.data)


def read_stored_config(cls: type[C], path: Path) -> C:
    """Return the configuration that a run stored. Raises ConfigInvalid."""
    return _build_config(cls, [FileArgument((), str(path))])


def parse_section(cls: type[C], table: dict[str, Any], *, key: str) -> C:
    """Return the section `cls` from a table whose keys the surrounding schema does not know, such as a plugin's.

    `key` is the key of the section, for messages. Raises ConfigInvalid with every problem.
    """
    return getattr(_build_config(_create_wrapper(cls, key), [], {key: table}), key)


@lru_cache(maxsize=256)  # a run resolves each of its plugins several times; creating a model takes milliseconds
def _create_wrapper(cls: type[Config], key: str) -> type[Config]:
    """Return a configuration class with the section `cls` at `key`."""
    fields: Any = {key: (cls, ...)}
    return create_model("_Wrapper", __base__=Config, **fields)


@contextmanager
def add_origins(cls: type[Config], args: Sequence[str], argv: Sequence[str]) -> Generator[None]:
    """Add the file or flag that set the value to each problem of a ConfigInvalid that is raised inside.

    Keys of a plugin's table are checked by the plugin, often in another process, which does not know the command line.
    `args` are the arguments that were parsed as `cls`. A flag is named only if it is also in `argv`: it may stand for
    another argument of the user.
    """
    try:
        yield
    except ConfigInvalid as error:
        if type(error) is not ConfigInvalid or not any(problem.key for problem in error.problems):
            raise
        layers = ConfigLayers(cls)
        with suppress(ConfigInvalid):  # a file may be gone by now
            _merge_arguments(layers, split_arguments(cls, args))
        flags = {arg.partition("=")[0] for arg in argv}

        def add_origin(problem: ConfigProblem) -> ConfigProblem:
            if not problem.key or problem.origin:
                return problem
            key = layers.find_given_key(parse_key(problem.key))
            origin = layers.find_origin(key)
            is_known = origin in flags or not origin.startswith("--")
            return problem._replace(key=format_key(key), origin=origin if is_known else "")

        # Several sources may refuse the same shared value.
        problems = list(dict.fromkeys(map(add_origin, error.problems)))
        raise ConfigInvalid(problems=problems) from error


def _parse_arguments(cls: type[Config], args: Sequence[str], *, prog: str | None, usage: str) -> list[Argument]:
    """Return the files and flags in `args`. `--help` prints `usage` and keys, `--help SECTION` its keys, and exits."""
    flags = [index for index, arg in enumerate(args) if arg in ("--help", "-h")]
    if flags:
        section = next((arg for arg in args[flags[0] + 1 :][:1] if not arg.startswith(("-", "@"))), None)
        if section is None and usage:
            print(usage)
        print(format_help(cls, prog or "", section))
        sys.exit(0)
    return split_arguments(cls, args)


def _build_config(
    cls: type[C],
    arguments: Sequence[Argument],
    base: Mapping[str, Any] | None = None,
    *,
    command_flags: Sequence[str] = (),
) -> C:
    """Return the configuration from files and flags over the table `base`. Raises ConfigInvalid."""
    layers = ConfigLayers(cls, base)
    problems = _merge_arguments(layers, arguments)
    try:
        config = cls.model_validate(layers.data)
    except ValidationError as error:
        reported = {problem.key for problem in problems}
        problems += [problem for problem in explain_errors(error, layers, command_flags) if problem.key not in reported]
        raise ConfigInvalid(problems=problems) from error
    if problems:
        raise ConfigInvalid(problems=problems)
    return config


def _merge_arguments(layers: ConfigLayers, arguments: Sequence[Argument]) -> list[ConfigProblem]:
    """Add all files, then all flags, and return the problems of those that cannot be added."""
    problems = [argument for argument in arguments if isinstance(argument, ConfigProblem)]
    bad_files = _apply_each(layers.add_file, [file for file in arguments if isinstance(file, FileArgument)])
    if bad_files:  # without them, other problems cannot be judged
        raise ConfigInvalid(problems=[*problems, *bad_files])
    return problems + _apply_each(layers.add_flag, [flag for flag in arguments if isinstance(flag, FlagArgument)])


def _apply_each(apply: Callable[[Any], None], arguments: Sequence[Any]) -> list[ConfigProblem]:
    """Add each file or flag to the layers, and return the problems of those that cannot be added."""
    problems: list[ConfigProblem] = []
    for argument in arguments:
        try:
            apply(argument)
        except ConfigInvalid as error:
            problems += error.problems
    return problems


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
    """Return a hint: the same key further down, a similar one in the section or elsewhere, or else the valid keys."""
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
    keys = list(iter_keys(layers.cls))
    below = [other for other in keys if section and (*other[: len(section)], other[-1]) == key]
    if len(below) == 1 and not find_similar(str(name), valid_keys, cutoff=CLEARLY_SIMILAR):
        return f"did you mean {dashes}{format_key(below[0])}?"
    if similar := find_similar(str(name), valid_keys):
        return f"did you mean {dashes}{format_key((*section, similar))}?"
    elsewhere = {str(other[-1]): other for other in reversed(keys)}
    if similar := find_similar(str(name), elsewhere, cutoff=CLEARLY_SIMILAR):
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
