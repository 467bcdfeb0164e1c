"""Names the file or flag that set a value which is found invalid only after the configuration was parsed.

The keys of a plugin's table are checked by the plugin, often in another process, which does not know the command line.
So the command adds the origins to the errors that it gets back.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ramify.config.arguments import FileArgument, FlagArgument, split_arguments
from ramify.config.base import Config
from ramify.config.layers import ConfigLayers
from ramify.config.parser import apply_each, parse_problems, raise_config_invalid
from ramify.config.schema import KeyPath
from ramify.errors import ConfigInvalid


@contextmanager
def add_origins(cls: type[Config], args: Sequence[str], argv: Sequence[str]) -> Generator[None]:
    """Add the file or flag that set the value to each problem of a ConfigInvalid that is raised inside.

    `args` are the arguments that were parsed as `cls`. A flag is named only if it is also in `argv`: it may stand for
    another argument of the user.
    """
    try:
        yield
    except ConfigInvalid as error:
        problems = parse_problems(error)
        if type(error) is not ConfigInvalid or not any(key for key, _ in problems):
            raise
        layers = _merge_arguments(cls, args)
        flags = {arg.partition("=")[0] for arg in argv}
        origins = [layers.find_origin(_parse_key(key)) if key else None for key, _ in problems]
        shown = [origin if origin and (origin in flags or not origin.startswith("--")) else None for origin in origins]
        raise_config_invalid(
            [(key, f"{text} ({origin})" if origin else text) for (key, text), origin in zip(problems, shown)],
            cause=error,
        )


def _merge_arguments(cls: type[Config], args: Sequence[str]) -> ConfigLayers:
    """Return the layers of arguments that were parsed before; a file that is gone by now is left out."""
    layers, arguments = ConfigLayers(cls), split_arguments(cls, args)
    apply_each(layers.add_file, [argument for argument in arguments if isinstance(argument, FileArgument)])
    apply_each(layers.add_flag, [argument for argument in arguments if isinstance(argument, FlagArgument)])
    return layers


def _parse_key(text: str) -> KeyPath:
    """Return the key of its dotted form, such as `train.0.pool.min`."""
    return tuple(int(part) if part.isdecimal() else part for part in text.split("."))
