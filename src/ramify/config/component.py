"""Parse the configuration of a component command, such as `trainer`, which also accepts the file of the full run.

If a file has a key that only the full run's configuration has, the files are validated as that configuration. The
component's section is then extracted from it, and flags, which are always the component's own, apply on top.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ramify.config.arguments import ArgumentProblem, FileArgument, split_arguments
from ramify.config.base import Config
from ramify.config.layers import ConfigLayers
from ramify.config.parser import build_config, parse_arguments

C = TypeVar("C", bound=Config)
P = TypeVar("P", bound=Config)


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
    """Return what `parse` returns, and the full run's configuration if the files are of it, else None.

    `extract` returns the component's table of the full run's configuration.
    """
    arguments = parse_arguments(cls, args, prog=prog, usage=usage)
    files = [argument for argument in arguments if isinstance(argument, FileArgument) and not argument.section]
    if not (_top_level_keys(files) - set(cls.model_fields)) & set(parent_cls.model_fields):
        return build_config(cls, arguments, command_flags=command_flags), None
    parent = build_config(parent_cls, files)
    others = [argument for argument in arguments if argument not in files]
    return build_config(cls, others, extract(parent), command_flags=command_flags), parent


def read_top_level_keys(cls: type[Config], args: Sequence[str]) -> set[str]:
    """Return the top-level keys of the files in `args`; an empty set if one cannot be read."""
    arguments = split_arguments(cls, args)
    return _top_level_keys([file for file in arguments if isinstance(file, FileArgument) and not file.section])


def _top_level_keys(files: Sequence[FileArgument]) -> set[str]:
    """Return the top-level keys of the files; an empty set if one cannot be read, which is reported later."""
    layers = ConfigLayers(Config)
    for file in files:
        try:
            layers.add_file(file)
        except ArgumentProblem:
            return set()
    return set(layers.data)
