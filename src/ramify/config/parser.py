"""From the arguments of a command to its configuration, or to one message with everything that is wrong.

The library `pydantic_config` supplies the help page and the last step (aliases, validation). It is handed one finished
table, because its own reading of flags stops at the doors of lists and union variants, and of TOML it needs another
parser than the standard one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import pydantic_config  # pyright: ignore[reportMissingTypeStubs]
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ramify.config.arguments import Argument, ArgumentProblem, FileArgument, FlagArgument, split_arguments
from ramify.config.base import Config
from ramify.config.error_messages import explain_errors
from ramify.config.layers import ConfigLayers
from ramify.errors import ConfigInvalid

C = TypeVar("C", bound=Config)

# Its overloads leave out `prog`, and ask for a default of the very class; any model does.
_pydantic_cli: Callable[..., Any] = pydantic_config.cli


class _RawTable(BaseModel):
    """What files and flags said, in the form in which the library takes a layer under its own."""

    model_config = ConfigDict(extra="allow")


def parse(cls: type[C], args: Sequence[str], *, prog: str | None = None, command_flags: Sequence[str] = ()) -> C:
    """The configuration that `args` describe: `@ file.toml ... --key value ...`, over the defaults of `cls`.

    `command_flags` are flags that the command reads itself, outside the configuration. A misspelt flag may mean one of
    them.

    Raises ConfigInvalid with every problem found. `--help` prints the keys and exits.
    """
    return build_config(cls, parse_arguments(cls, args, prog=prog), command_flags=command_flags)


def parse_arguments(cls: type[Config], args: Sequence[str], *, prog: str | None = None) -> list[Argument]:
    """The files and flags among `args`. `--help` prints the keys and exits."""
    if "--help" in args or "-h" in args:
        _pydantic_cli(cls, args=["--help"], prog=prog)
    return split_arguments(cls, args)


def build_config(
    cls: type[C],
    arguments: Sequence[Argument],
    base: Mapping[str, Any] | None = None,
    *,
    command_flags: Sequence[str] = (),
) -> C:
    """The configuration that files and flags describe, over the table `under`. Raises ConfigInvalid."""
    layers = ConfigLayers(cls, base)
    files = [argument for argument in arguments if isinstance(argument, FileArgument)]
    flags = [argument for argument in arguments if isinstance(argument, FlagArgument)]
    unreadable = [argument for argument in arguments if isinstance(argument, ArgumentProblem)]

    bad_files = _apply_each(layers.add_file, files)
    if bad_files:  # without them nothing can be said about the rest
        raise_config_invalid([(problem.key, problem.reason) for problem in unreadable + bad_files])
    unreadable += _apply_each(layers.add_flag, flags)
    problems = [(problem.key, problem.reason) for problem in unreadable]
    try:
        config: C = _pydantic_cli(cls, args=[], default=_RawTable.model_validate(layers.data))
    except pydantic_config.ConfigFileError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        known = {key for key, _ in problems}
        problems += [
            (key, text)
            for key, text in explain_errors(error.__cause__, layers, command_flags).items()
            if key not in known
        ]
        raise_config_invalid(problems)
    if problems:
        raise_config_invalid(problems)
    return config


def parse_section(cls: type[C], table: dict[str, Any], *, key: str) -> C:
    """The section `cls` filled from a table that the schema around it leaves open, such as a plugin's.

    `at` is the key of the section, as problems name it. Raises ConfigInvalid with every problem found.
    """
    section: Any = {key: (cls, ...)}
    around: type[Config] = create_model("_Around", __base__=Config, **section)
    layers = ConfigLayers(around)
    layers.data = {key: table}
    try:
        return getattr(around.model_validate(layers.data), key)
    except ValidationError as error:
        raise_config_invalid(list(explain_errors(error, layers).items()))


def pop_flag(args: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether a command's own bare flag (`--dry-run`, no part of its configuration) is there, and the other args."""
    return flag in args, [arg for arg in args if arg != flag]


def _apply_each(apply: Callable[[Any], None], arguments: Sequence[Any]) -> list[ArgumentProblem]:
    problems: list[ArgumentProblem] = []
    for argument in arguments:
        try:
            apply(argument)
        except ArgumentProblem as problem:
            problems.append(problem)
    return problems


def raise_config_invalid(problems: Sequence[tuple[str, str]], *, cause: BaseException | None = None) -> NoReturn:
    """Raise ConfigInvalid with all problems, each a key and what is wrong with it."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration:"
    lines = [f"  {key}: {text}" if key else f"  {text}" for key, text in problems]
    raise ConfigInvalid("\n".join([count, *lines])) from cause
