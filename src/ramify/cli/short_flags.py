"""The short flags of commands: -m the model, -o the output directory, -b the addresses of running servers."""

import json
from collections.abc import Mapping, Sequence

from ramify.config import raise_config_invalid

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
            raise_config_invalid([(SERVER_FLAG, "needs the address of a server, such as http://10.0.0.1:8000")])
        expanded.append(f"{short_flags[arg]}={json.dumps({'engine': 'external', 'base_url': urls})}")
    return expanded


def expand_taskset_id(args: Sequence[str]) -> list[str]:
    """Return the arguments with a leading taskset id written as `--taskset.id ID`."""
    return ["--taskset.id", *args] if args and not args[0].startswith(("-", "@")) else list(args)
