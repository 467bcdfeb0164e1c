"""`ramify rl --help taskset`: the plugins of a kind; `--help taskset.ID`: the options of one."""

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ramify.core.config import Config
from ramify.core.config.help import HelpKey, format_section
from ramify.env.plugin import PLUGIN_KINDS, find_plugin_class, get_config_class

HELP_FLAGS = ("--help", "-h")


def find_plugin_topic(args: Sequence[str]) -> str | None:
    """Return the argument after `--help` if it is a kind of plugin, or a kind and an id with a point between them."""
    topics = [topic for flag, topic in pairwise(args) if flag in HELP_FLAGS]
    return next((topic for topic in topics if topic.partition(".")[0] in PLUGIN_KINDS), None)


def format_plugin_help(topic: str, prog: str) -> str:
    """Return the plugins of a kind, or the options of one. Raises ConfigInvalid for an unknown id."""
    kind, _, id = topic.partition(".")
    if not id:
        return "\n".join(_list_plugins(kind, prog))
    plugin = find_plugin_class(kind, id)
    keys = format_section(HelpKey(kind, [get_config_class(plugin, Config)]))
    return "\n".join([f"{kind} {id!r}: {read_summary(plugin)}", *keys])


def _list_plugins(kind: str, prog: str) -> Iterator[str]:
    ids = PLUGIN_KINDS[kind].builtin_paths
    width = max(map(len, ids)) + 4
    yield f"A {kind} is a table: its `id`, and its options. '{prog} --help {kind}.ID' prints the options."
    yield "The `id` is one of"
    for id in ids:
        yield f"  {id}".ljust(width) + read_summary(find_plugin_class(kind, id))
    yield "or a file.py, package.module:Class, or a name that an installed package registers."


def read_summary(plugin: type) -> str:
    """Return the first paragraph of a class's docstring, on one line."""
    return " ".join((inspect.getdoc(plugin) or "").split("\n\n")[0].split())
