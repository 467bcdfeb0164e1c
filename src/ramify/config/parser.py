"""Parse the arguments of a command into its configuration, or raise one error with all wrong keys and values."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError, create_model

from ramify.config.arguments import Argument, ArgumentProblem, FileArgument, FlagArgument, split_arguments
from ramify.config.base import Config
from ramify.config.error_messages import explain_errors
from ramify.config.help import format_help
from ramify.config.layers import ConfigLayers
from ramify.errors import ConfigInvalid
from ramify.names import format_count

C = TypeVar("C", bound=Config)


def parse(
    cls: type[C], args: Sequence[str], *, prog: str | None = None, usage: str = "", command_flags: Sequence[str] = ()
) -> C:
    """Return the configuration from `args` (`@ file.toml ... --key value ...`) over the defaults of `cls`.

    `command_flags` are flags that the command handles itself, outside the configuration; they are suggested for
    misspelt flags. Raises ConfigInvalid with every problem. `--help` prints `usage` and the keys, and exits.
    """
    return build_config(cls, parse_arguments(cls, args, prog=prog, usage=usage), command_flags=command_flags)


def parse_arguments(cls: type[Config], args: Sequence[str], *, prog: str | None, usage: str) -> list[Argument]:
    """Return the files and flags in `args`. `--help` prints `usage` and keys, `--help SECTION` its keys, and exits."""
    flags = [index for index, arg in enumerate(args) if arg in ("--help", "-h")]
    if flags:
        section = next((arg for arg in args[flags[0] + 1 :][:1] if not arg.startswith(("-", "@"))), None)
        if section is None and usage:
            print(usage)
        print(format_help(cls, prog or "", section))
        sys.exit(0)
    return split_arguments(cls, args)


def build_config(
    cls: type[C],
    arguments: Sequence[Argument],
    base: Mapping[str, Any] | None = None,
    *,
    command_flags: Sequence[str] = (),
) -> C:
    """Return the configuration from files and flags over the table `base`. Raises ConfigInvalid."""
    layers = ConfigLayers(cls, base)
    files = [argument for argument in arguments if isinstance(argument, FileArgument)]
    flags = [argument for argument in arguments if isinstance(argument, FlagArgument)]
    argument_problems = [argument for argument in arguments if isinstance(argument, ArgumentProblem)]

    bad_files = apply_each(layers.add_file, files)
    if bad_files:  # without them, other problems cannot be judged
        raise_config_invalid([(problem.key, problem.reason) for problem in argument_problems + bad_files])
    argument_problems += apply_each(layers.add_flag, flags)
    problems = [(problem.key, problem.reason) for problem in argument_problems]
    try:
        config = cls.model_validate(layers.data)
    except ValidationError as error:
        reported = {key for key, _ in problems}
        explained = explain_errors(error, layers, command_flags)
        raise_config_invalid(problems + [(key, text) for key, text in explained.items() if key not in reported])
    if problems:
        raise_config_invalid(problems)
    return config


def read_stored_config(cls: type[C], path: Path) -> C:
    """Return the configuration that a run stored. Raises ConfigInvalid."""
    return build_config(cls, [FileArgument((), str(path))])


def parse_section(cls: type[C], table: dict[str, Any], *, key: str) -> C:
    """Return the section `cls` from a table whose keys the surrounding schema does not know, such as a plugin's.

    `key` is the key of the section, for messages. Raises ConfigInvalid with every problem.
    """
    fields: Any = {key: (cls, ...)}
    wrapper: type[Config] = create_model("_Wrapper", __base__=Config, **fields)
    return getattr(build_config(wrapper, [], {key: table}), key)


def pop_flags(args: Sequence[str], flags: Sequence[str]) -> tuple[list[bool], list[str]]:
    """Return which flags of the command itself, such as `--dry-run`, are in `args`, and the other arguments."""
    return [flag in args for flag in flags], [arg for arg in args if arg not in flags]


def apply_each(apply: Callable[[Any], None], arguments: Sequence[Any]) -> list[ArgumentProblem]:
    """Add each file or flag to the layers, and return those that cannot be added."""
    problems: list[ArgumentProblem] = []
    for argument in arguments:
        try:
            apply(argument)
        except ArgumentProblem as problem:
            problems.append(problem)
    return problems


def raise_config_invalid(problems: Sequence[tuple[str, str]], *, cause: BaseException | None = None) -> NoReturn:
    """Raise ConfigInvalid with all problems, each a key (or "") and a description."""
    count = f"{format_count(len(problems), 'problem')} in the configuration:"
    lines = [f"  {key}: {text}" if key else f"  {text}" for key, text in problems]
    raise ConfigInvalid("\n".join([count, *lines])) from cause


def parse_problems(error: ConfigInvalid) -> list[tuple[str, str]]:
    """Return the problems that `raise_config_invalid` raised; an error with another message is one problem."""
    head, *lines = error.message.splitlines()
    if not head.endswith("in the configuration:"):
        return [("", error.message)]
    return [(key, text) if text else ("", key) for key, _, text in (line.strip().partition(": ") for line in lines)]
