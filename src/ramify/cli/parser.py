"""The argument parser of commands without a configuration, and what commands share about their arguments."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from ramify.cli.app import COMMANDS
from ramify.core.names import suggest


class CommandParser(argparse.ArgumentParser):
    """The parser of `ramify COMMAND`. It reports an unknown flag, with the most similar one, before anything else."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"ramify {command}", description=COMMANDS[command].help)

    def add_run_argument(self, help: str = "run directory, or name of a run in ./outputs", **options: Any) -> None:
        """Add the argument RUN."""
        self.add_argument("run", metavar="RUN", help=help, **options)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - the base class has overloads
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
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


def format_resume_command(command: str, argv: Sequence[str]) -> str:
    """Return the command line that resumes a run which was started with `argv`."""
    return shlex.join(["ramify", command, *(arg for arg in argv if arg not in ("--fresh", "--accept-changes"))])


def _is_flag(word: str) -> bool:
    """Return whether the word is a flag: -1 and -.5 are numbers."""
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _is_known(flag: str, known: Sequence[str]) -> bool:
    """Return whether the flag is known, abbreviated (`--ful`), or a short one with its value (`-oFILE`)."""
    return any(name.startswith(flag) for name in known) if flag.startswith("--") else flag[:2] in known
