"""Parse the arguments of a command into its configuration, or raise one error with all wrong keys and values."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from ramify.core.config.base import Config
from ramify.core.config.error_messages import explain_errors
from ramify.core.config.help import format_help
from ramify.core.config.layers import Argument, ConfigLayers, FileArgument, FlagArgument, split_arguments
from ramify.core.config.schema import format_key, parse_key
from ramify.core.errors import ConfigInvalid, ConfigProblem

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
    fields: Any = {key: (cls, ...)}
    wrapper: type[Config] = create_model("_Wrapper", __base__=Config, **fields)
    return getattr(_build_config(wrapper, [], {key: table}), key)


def pop_flags(args: Sequence[str], flags: Sequence[str]) -> tuple[list[bool], list[str]]:
    """Return which flags of the command itself, such as `--dry-run`, are in `args`, and the other arguments."""
    return [flag in args for flag in flags], [arg for arg in args if arg not in flags]


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
