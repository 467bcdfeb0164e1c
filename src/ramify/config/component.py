"""A command that is one part of a larger one reads the larger one's file too, and takes what is its own.

The file is the whole's as soon as it says something that the part has no key for and the whole has: it is then judged
as the whole's, all of it, and what the part takes lies below the flags, which are always the part's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ramify.config.arguments import ArgumentProblem, FileArgument
from ramify.config.base import Config
from ramify.config.layers import ConfigLayers
from ramify.config.parser import build_config, parse_arguments

P = TypeVar("P", bound=Config)
W = TypeVar("W", bound=Config)


def parse_component(
    cls: type[P],
    args: Sequence[str],
    parent_cls: type[W],
    extract: Callable[[W], Mapping[str, Any]],
    *,
    prog: str | None = None,
    command_flags: Sequence[str] = (),
) -> tuple[P, W | None]:
    """As `parse`, with the whole that the files were of, or None. `take` gives the part's share of it, as a table."""
    arguments = parse_arguments(cls, args, prog=prog)
    files = [argument for argument in arguments if isinstance(argument, FileArgument) and not argument.section]
    if not (_top_level_keys(files) - set(cls.model_fields)) & set(parent_cls.model_fields):
        return build_config(cls, arguments, command_flags=command_flags), None
    found = build_config(parent_cls, files)
    rest = [argument for argument in arguments if argument not in files]
    return build_config(cls, rest, extract(found), command_flags=command_flags), found


def _top_level_keys(files: Sequence[FileArgument]) -> set[str]:
    """The keys at the top of the files; those of a file that cannot be read are named when it is read again."""
    layers = ConfigLayers(Config)
    for file in files:
        try:
            layers.add_file(file)
        except ArgumentProblem:
            return set()
    return set(layers.data)
