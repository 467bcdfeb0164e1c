"""The short flags of commands: -m the model, -o the output directory, -b the addresses of running servers."""

import json
from collections.abc import Mapping, Sequence

from ramify.core.config import find_file_hint
from ramify.core.errors import ConfigInvalid

SERVER_FLAG = "-b"
SHORT_FLAGS = {"-m": "--model.name", "-o": "--output", SERVER_FLAG: "--inference"}


def expand_short_flags(args: Sequence[str], short_flags: Mapping[str, str] = SHORT_FLAGS) -> list[str]:
    """Return the arguments with short flags replaced by their keys. `-b` replaces the whole `inference` table."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg != SERVER_FLAG or arg not in short_flags:
            expanded.append(short_flags.get(arg, arg))
            continue
        urls: list[str] = []
        while rest and not rest[0].startswith(("-", "@")):
            urls.append(rest.pop(0).rstrip("/").removesuffix("/v1"))
        if not urls:
            raise ConfigInvalid("needs the address of a server, such as http://10.0.0.1:8000", key=SERVER_FLAG)
        expanded.append(f"{short_flags[arg]}={json.dumps({'engine': 'external', 'base_url': urls})}")
    return expanded


def expand_taskset_id(args: Sequence[str]) -> list[str]:
    """Return the arguments with a leading taskset id written as `--taskset.id ID`. Raises ConfigInvalid."""
    id, rest = pop_taskset_id(args)
    return rest if id is None else ["--taskset.id", id, *rest]


def pop_taskset_id(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return a leading taskset id, None if there is none, and the other arguments. Raises ConfigInvalid for a file."""
    if not args or args[0].startswith(("-", "@")):
        return None, list(args)
    if hint := find_file_hint(args[0]):
        raise ConfigInvalid(f"{args[0]!r} is not a taskset: {hint}")
    return args[0], list(args[1:])
