"""The arguments of a command with a configuration: its own flags, shorthands, files, keys, and help on plugins.

argv --pop the command's flags--> --expand shorthands--> `@ file.toml --key value` --parse--> ConfigCall

`--help taskset` lists the plugins of a kind, `--help taskset.ID` the options of one.
"""

import inspect
import itertools
import json
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramify.cli.commands import COMMANDS, RUN_CONFIG, ConfigCommand, load
from ramify.core.config import Config, add_origins, find_file_hint, parse, parse_component, read_top_level_keys
from ramify.core.config.help import HelpKey, format_section
from ramify.core.errors import ConfigInvalid
from ramify.env.plugin import PLUGIN_KINDS, find_plugin_class, get_config_class

if TYPE_CHECKING:
    from ramify.orchestrate.run_config import RunConfig
    from ramify.rollout.evals.blocked_loop import CrashReporter

C = TypeVar("C", bound=Config)

SERVER_FLAG, DATA_FLAG = "-b", "-d"
USAGE_WIDTH = 120
START_FLAGS = ("--fresh", "--accept-changes")  # that a command which resumes a run does not repeat
HELP_FLAGS = ("--help", "-h")


@dataclass(frozen=True, slots=True)
class ConfigCall(Generic[C]):
    """A call of a command: its configuration, its own flags by name, and its arguments as the user wrote them."""

    name: str
    argv: Sequence[str]
    config: C
    flags: Namespace
    run_config: "RunConfig | None" = None  # the configuration of the whole run, if the file was one
    crash_reporter: "CrashReporter | None" = None

    @property
    def resume_command(self) -> str:
        """The command line that resumes the run."""
        return format_resume_command(self.name, self.argv)


def run_config_command(name: str, argv: Sequence[str], *, owns_process: bool) -> int:
    """Parse the arguments of a command and run it, and return its exit code.

    `name` is its name in the table of commands; `owns_process` is false for a call from Python.
    """
    command = COMMANDS[name]
    assert isinstance(command, ConfigCommand)
    if not (command.reports_crashes and owns_process):
        return _run(name, command, argv)
    reporter: CrashReporter = load("ramify.rollout.evals.blocked_loop:CrashReporter")()
    if (exit_code := reporter.fork()) is not None:
        return exit_code
    try:
        return _run(name, command, argv, reporter)
    finally:
        reporter.set_finished()


def _run(name: str, command: ConfigCommand, argv: Sequence[str], reporter: "CrashReporter | None" = None) -> int:
    cls: type[Config] = load(command.config)
    if topic := find_plugin_topic(argv):
        print(format_plugin_help(topic, f"ramify {name}"))
        return 0
    flags, rest = _pop_flags(command, argv)
    args = expand_arguments(name, rest)
    settings: dict[str, Any] = {
        "prog": f"ramify {name}",
        "usage": _format_usage(name, command),
        "command_flags": [flag.split()[0] for flag in command.flags],
    }
    run_config: RunConfig | None = None
    if command.extract:
        extract, run_class = load(command.extract), load(RUN_CONFIG)
        config, run_config = parse_component(cls, args, run_class, lambda run: extract(run, flags, args), **settings)
    else:
        config = parse(cls, args, **settings)
    from ramify.infer.config import expand_run_models  # loaded here, not for help

    with add_origins(cls, args, argv):
        config = expand_run_models(config)
        return load(command.run)(ConfigCall(name, argv, config, flags, run_config, reporter))


def _pop_flags(command: ConfigCommand, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the values of the command's own flags, and the other arguments."""
    flags, rest = Namespace(), list(argv)
    for flag, _, metavar in (flag.partition(" ") for flag in command.flags):
        value: Any = flag in rest
        if metavar and rest.count(flag) > 1:
            raise ConfigInvalid(f"{flag} is allowed once, got it {rest.count(flag)} times")
        if metavar and value:
            index = rest.index(flag)
            if index + 1 == len(rest):
                raise ConfigInvalid(f"{flag} needs a value: {flag} {metavar}")
            value = rest.pop(index + 1)
        rest = [arg for arg in rest if arg != flag]
        setattr(flags, flag.removeprefix("--").replace("-", "_"), value if not metavar or value else None)
    return flags, rest


def _format_usage(name: str, command: ConfigCommand) -> str:
    """Return the help page up to the keys."""
    starts = ("usage: ", *itertools.repeat("       ", len(command.usage) - 1))
    lines = [f"{start}ramify {name} {text}" for start, text in zip(starts, command.usage)]
    rows = {**command.arguments, **command.flags}
    width = max(map(len, rows), default=0) + 4
    lines += [""] if rows else []
    for row, text in rows.items():
        first, *others = textwrap.wrap(text, USAGE_WIDTH - width)
        lines += [f"  {row}".ljust(width) + first, *(" " * width + line for line in others)]
    paragraphs = [textwrap.fill(" ".join(text.split()), USAGE_WIDTH) for text in command.notes.split("\n\n")]
    return "\n".join([*lines, "", "\n\n".join(paragraphs), ""])


def format_resume_command(name: str, argv: Sequence[str]) -> str:
    """Return the command line that resumes a run which was started with `argv`."""
    return shlex.join(["ramify", name, *(arg for arg in argv if arg not in START_FLAGS)])


# -- shorthands ---------------------------------------------------------------------------------------------------


def expand_arguments(name: str, args: Sequence[str]) -> list[str]:
    """Return the arguments of a command with its short flags and other shorthands replaced by their keys."""
    command = COMMANDS[name]
    assert isinstance(command, ConfigCommand)
    expanded = _expand_short_flags(args, command.short_flags)
    return load(command.expand)(expanded) if command.expand else expanded


def _expand_short_flags(args: Sequence[str], short_flags: Mapping[str, str]) -> list[str]:
    """Return the arguments with short flags replaced by their keys. `-b` replaces the whole `inference` table."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == DATA_FLAG and short_flags.get(arg) in expanded:
            raise ConfigInvalid("is given twice; write several datasets as [[data]] tables in a file", key=arg)
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
    """Return the arguments with a leading taskset id written as `--taskset.id ID`."""
    id, rest = _pop_taskset_id(args)
    return rest if id is None else ["--taskset.id", id, *rest]


def expand_eval(args: Sequence[str]) -> list[str]:
    """Do what `expand_taskset_id` does; refuse the configuration of a run."""
    if "train" in read_top_level_keys(Config, args):
        raise ConfigInvalid(
            "the file is a configuration of `ramify rl`, since it has a `train` table; `ramify eval` expects the "
            "tables of one source, such as [taskset] and [harness], at the top level"
        )
    return expand_taskset_id(args)


def expand_run(args: Sequence[str]) -> list[str]:
    """Return the arguments with `--cluster NAME` and a leading taskset id replaced by their keys."""
    id, rest = _pop_taskset_id(_expand_cluster_flag(args))
    if id is None:
        return rest
    taskset = {"id": id}
    train, evals = [{"taskset": taskset}], [{"taskset": {**taskset, "split": "eval"}}]
    return [f"--train={json.dumps(train)}", f"--eval={json.dumps(evals)}", *_apply_to_train_and_eval(rest)]


def expand_cluster_run(args: Sequence[str]) -> list[str]:
    """Do what `expand_run` does, for a run on a Ray cluster."""
    return expand_run([*args, "--cluster", "ray"])


def _pop_taskset_id(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return a leading taskset id, None if there is none, and the other arguments. Raises ConfigInvalid for a file."""
    if not args or args[0].startswith(("-", "@")):
        return None, list(args)
    if hint := find_file_hint(args[0]):
        raise ConfigInvalid(f"{args[0]!r} is not a taskset: {hint}")
    return args[0], list(args[1:])


def _expand_cluster_flag(args: Sequence[str]) -> list[str]:
    """Return the arguments with `--cluster NAME` replaced by `--cluster.launcher NAME`."""
    expanded = list(args)
    for index, (arg, value) in enumerate(itertools.pairwise([*args, "@"])):
        if arg != "--cluster" or value.startswith("{"):
            continue
        if value.startswith(("-", "@")):
            raise ConfigInvalid("expected ray, got no value; without the flag the run is local", key="--cluster")
        expanded[index] = "--cluster.launcher"
    return expanded


def _apply_to_train_and_eval(args: Sequence[str]) -> list[str]:
    """Return the arguments with `--taskset.KEY` replaced by the keys of the train source and of the eval source."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--taskset."):
            expanded.append(arg)
            continue
        words: list[str] = []
        while "=" not in arg and rest and not rest[0].startswith(("--", "@")):
            words.append(rest.pop(0))
        key = arg.removeprefix("--")
        expanded += [f"--train.0.{key}", *words, f"--eval.0.{key}", *words]
    return expanded


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
