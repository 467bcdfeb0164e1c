"""The reference of all configuration keys, as pages of the site: one per command, and one for the options of plugins.

The pages are generated from the configuration classes when the site is built (`tools/site.py`), so they need no upkeep.
`python -m tools.reference rl` prints one.
"""

import sys
from collections.abc import Iterator

from pydantic import BaseModel

from ramify.cli.arguments import read_summary
from ramify.cli.commands import COMMANDS, ConfigCommand, load
from ramify.core.config import Config
from ramify.core.config.help import HelpKey, HelpSection, format_default, format_type, iter_sections
from ramify.env.plugin import PLUGIN_KINDS, find_plugin_class, get_config_class

FOLDER = "reference"
PLUGINS = "plugins"
INTRODUCTION = """All configuration keys of {names}, generated from the configuration classes. `trainer.optim.lr` is
`lr` in the table `[trainer.optim]` of a file, and the flag `--trainer.optim.lr`. Entries of a list are numbered:
`train.0` is the first table `[[train]]`. `NAME` is a name that you choose. Tables with an `id` have the keys of a
[plugin](plugins.md). [Configuration](../configuration.md) says how files and flags are combined."""
PLUGINS_INTRODUCTION = """The keys of the tables that select a plugin by `id`, such as
`taskset = { id = "dataset", path = "sums.jsonl" }`, for the plugins that come with Ramify. The flag
`--taskset.KEY VALUE` of `ramify rl ID` sets one."""


def list_pages() -> dict[str, str]:
    """Return the text of each page by its name, such as `rl`; commands with the same configuration share a page."""
    commands = {name: command for name, command in COMMANDS.items() if isinstance(command, ConfigCommand)}
    names: dict[str, list[str]] = {}
    for name, command in commands.items():
        names.setdefault(command.config, []).append(name)
    pages = {first: format_command(load(path), first, others) for path, (first, *others) in names.items()}
    return {**pages, PLUGINS: "\n".join(_format_plugins())}


def format_command(config: type[BaseModel], name: str, other_names: list[str]) -> str:
    """Return the page of a command's configuration, section by section."""
    others = f", and of {', '.join(f'`ramify {other}`' for other in other_names)}" if other_names else ""
    lines = [f"# Keys of `ramify {name}`", "", INTRODUCTION.format(names=f"`ramify {name}`{others}")]
    for section in iter_sections(HelpKey("", [config])):
        lines += _format_section(section)
    return "\n".join(lines)


def _format_section(section: HelpSection) -> Iterator[str]:
    title = f"`{section.path}`" if section.path else "Top level"
    yield from ("", f"## {title}" + (f" with `{section.variant}`" if section.variant else ""), "")
    yield read_summary(section.model) if section.path else ""
    yield from ("", *format_keys(section.keys))


def format_keys(keys: list[HelpKey]) -> Iterator[str]:
    """Yield the table of plain keys."""
    if keys:
        yield from ("| key | type | default | description |", "|---|---|---|---|")
    for key in keys:
        types = " or ".join(dict.fromkeys(format_type(option).replace("|", " or ") for option in key.options))
        default = format_default(key.default).removeprefix("(").removesuffix(")")
        shown = default if default in ("", "required") else f"`{default}`"
        yield "| " + " | ".join(_escape(cell) for cell in (f"`{key.path}`", types, shown, key.text)) + " |"


def _format_plugins() -> Iterator[str]:
    yield from ("# Options of plugins", "", PLUGINS_INTRODUCTION)
    for kind, plugins in PLUGIN_KINDS.items():
        yield from ("", f"## {kind}")
        for id in plugins.builtin_paths:
            plugin = find_plugin_class(kind, id)
            config = get_config_class(plugin, Config)
            yield from ("", f"### {kind} `{id}`", "", read_summary(plugin), "")
            keys = [HelpKey("", [config]).get_child(config, name) for name in config.model_fields if name != "id"]
            yield from format_keys(keys)
            if not keys:
                yield "It has no options."


def _escape(text: str) -> str:
    """Return the text of a table's cell, in which a pipe would end the cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(list_pages()[sys.argv[1]])
