"""The short flags, which mean the same everywhere: -m the model, -o the output, -b the servers that run already."""

import json
from collections.abc import Sequence

from ramify.config import raise_config_invalid

SHORT_FLAGS = {"-m": "--model.name", "-o": "--output"}


def expand_short_flags(args: Sequence[str]) -> list[str]:
    """The arguments with short flags as the keys they stand for. `-b` replaces the whole of `inference`."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg != "-b":
            expanded.append(SHORT_FLAGS.get(arg, arg))
            continue
        urls: list[str] = []
        while rest and not rest[0].startswith(("-", "@")):
            urls.append(rest.pop(0).rstrip("/").removesuffix("/v1"))
        if not urls:
            raise_config_invalid([("-b", "needs the address of a server, such as http://10.0.0.1:8000")])
        expanded.append(f"--inference={json.dumps({'engine': 'external', 'base_url': urls})}")
    return expanded
