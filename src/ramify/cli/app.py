"""The entry point: find the command, run it, and turn exceptions into exit codes.

The function of a command is imported only when it runs, so help is fast. It is called with the parsed arguments,
returns an exit code, and raises named failures. Exit codes: 0 success, 1 a named failure, 2 an invalid command line or
configuration, 130 interrupted, 141 the reader of the output is gone (`ramify metrics RUN | head`).
"""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from ramify import __version__
from ramify.cli.commands import COMMANDS, CliCommand, ConfigCommand, OneOf, load
from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.core.names import suggest
from ramify.core.terminal import escape_output, print_exception
from ramify.core.watchdog import WATCHDOG
from ramify.processes.log import report_failure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. No text that it prints can control the terminal."""
    sys.excepthook = print_exception
    with escape_output():
        return _run_with_exit_code(argv)


def _run_with_exit_code(argv: Sequence[str] | None) -> int:
    WATCHDOG.report = _print_failure
    try:
        exit_code = _run(sys.argv[1:]) if argv is None else _run(list(argv), owns_process=False)
        sys.stdout.flush()  # inside `try`: it may raise BrokenPipeError
        return exit_code
    except RamifyError as error:
        return _print_failure(error)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):  # the two that every command that runs a model needs
            raise
        return _print_failure(ConfigInvalid(f"{error.name} is not installed; pip install 'ramify[local]'"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _discard_output_if_reader_gone():
            raise
        return 141


def _print_failure(error: RamifyError) -> int:
    """Print a failure, with its name unless it is a plain ConfigInvalid, and return the exit code."""
    print(error.message if type(error) is ConfigInvalid else f"{error.name}: {error.message}", file=sys.stderr)
    report_failure(error)
    return 2 if isinstance(error, ConfigInvalid) else 1


def _run(argv: list[str], *, owns_process: bool = True) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_format_help())
        return 0
    if argv[0] == "--version":
        print(f"ramify {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        similar = suggest(name, COMMANDS, "'ramify --help' lists the commands", "'ramify {}'")
        advice = load("ramify.core.config:load_hints")("commands").get(name, similar)
        raise ConfigInvalid(f"unknown {kind} {name!r}; {advice}")
    command = COMMANDS[name]
    try:
        if isinstance(command, ConfigCommand):
            return load("ramify.cli.arguments:run_config_command")(name, rest, owns_process=owns_process)
        options = CommandParser(name, command).parse_args(rest)
        return load(command.run)(options)
    except ConfigInvalid as error:
        if rest:
            raise
        raise ConfigInvalid(f"{error.message}\n'ramify {name} --help' shows the arguments") from error


def _discard_output_if_reader_gone() -> bool:
    """Return whether the reader of stdout is gone; if so, redirect stdout, with its buffered text, to /dev/null."""
    output = sys.stdout.fileno()
    poller = select.poll()
    poller.register(output, 0)  # errors and hang-ups are always reported
    if not poller.poll(0):
        return False
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, output)
    os.close(devnull)
    return True


def _format_help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: ramify COMMAND [ARGS]",
            "",
            "Reinforcement learning for language-model agents.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()),
            "",
            "options:",
            "  -h, --help  show this help; use 'ramify COMMAND --help' for a command",
            "  --version   show the version",
        ]
    )


class CommandParser(argparse.ArgumentParser):
    """The parser of `ramify COMMAND`. It reports an unknown flag, with the most similar one, before anything else."""

    def __init__(self, name: str, command: CliCommand) -> None:
        super().__init__(prog=f"ramify {name}", description=command.help)
        for entry in command.options:
            is_group = isinstance(entry, OneOf)
            container = self.add_mutually_exclusive_group(required=entry.required) if is_group else self
            for option in entry.options if is_group else (entry,):
                container.add_argument(*option.names, **option.settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse the first unknown flag; parse the arguments if there is none."""
        self._refuse_unknown_flag(args or ())
        return super().parse_known_args(args, namespace)

    def _refuse_unknown_flag(self, args: Sequence[str]) -> None:
        known = list(self._option_string_actions)
        for arg in args:
            if arg == "--":
                return
            flag = arg.partition("=")[0]
            if not _is_flag(flag) or _is_known(flag, known):
                continue
            self.error(f"unknown flag {flag}; {suggest(flag, known, '--help lists the flags', '{}')}")


def _is_flag(word: str) -> bool:
    """Return whether the word is a flag: -1 and -.5 are numbers."""
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _is_known(flag: str, known: Sequence[str]) -> bool:
    """Return whether the flag is known, abbreviated (`--ful`), or a short one with its value (`-oFILE`)."""
    return any(name.startswith(flag) for name in known) if flag.startswith("--") else flag[:2] in known
