"""A command that is one part of a larger one reads the larger one's file too, and takes what is its own.

The file is the whole's as soon as it says something that the part has no key for and the whole has: it is then judged
as the whole's, all of it, and what the part takes lies below the flags, which are always the part's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ramify.config.arguments import File, Unreadable
from ramify.config.base import Config
from ramify.config.entry import arguments_of, put_together
from ramify.config.layers import Layers

P = TypeVar("P", bound=Config)
W = TypeVar("W", bound=Config)


def parse_part(
    cls: type[P],
    args: Sequence[str],
    whole: type[W],
    take: Callable[[W], Mapping[str, Any]],
    *,
    prog: str | None = None,
    command_flags: Sequence[str] = (),
) -> tuple[P, W | None]:
    """As `parse`, with the whole that the files were of, or None. `take` gives the part's share of it, as a table."""
    arguments = arguments_of(cls, args, prog=prog)
    files = [argument for argument in arguments if isinstance(argument, File) and not argument.section]
    if not (_keys(files) - set(cls.model_fields)) & set(whole.model_fields):
        return put_together(cls, arguments, command_flags=command_flags), None
    found = put_together(whole, files)
    rest = [argument for argument in arguments if argument not in files]
    return put_together(cls, rest, take(found), command_flags=command_flags), found


def _keys(files: Sequence[File]) -> set[str]:
    """The keys at the top of the files; those of a file that cannot be read are named when it is read again."""
    layers = Layers(Config)
    for file in files:
        try:
            layers.add_file(file)
        except Unreadable:
            return set()
    return set(layers.data)
