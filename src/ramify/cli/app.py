"""The entry point: find the command, run it, turn what went wrong into an exit code.

A command is a line in a table. Its module is imported when it is asked for, so the cost of one command is never paid by
another, and help costs nothing. A module offers `run(args) -> int`, takes `--help` itself, and raises failures by name:
0 done, 1 a named failure, 2 a command line or configuration that cannot be used, 130 interrupted, 141 nobody reads what
is printed any more (`ramify metrics RUN | head`).
"""

import difflib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from ramify import __version__
from ramify.errors import ConfigInvalid, RamifyError


@dataclass(frozen=True, slots=True)
class CliCommand:
    """Where a command lives, and one line about it."""

    module: str
    help: str


COMMANDS: dict[str, CliCommand] = {
    "rl": CliCommand("ramify.cli.rl", "train a model on environments, all processes included; again to continue"),
    "eval": CliCommand("ramify.cli.eval", "run a taskset with a model and see how well it does; again to continue"),
    "why": CliCommand(
        "ramify.cli.why", "what a run is waiting for, or how it ended; --audit checks its files and ledger"
    ),
    "metrics": CliCommand("ramify.cli.metrics", "the numbers of a run, while it lives and afterwards"),
    "plot": CliCommand("ramify.cli.plot", "curves of one run or several, as a picture"),
    "show": CliCommand("ramify.cli.show", "the rollouts of a run, or one of them as a tree"),
    "replay": CliCommand("ramify.cli.replay", "score an eval's saved rollouts again with the rewards as they are now"),
    "export": CliCommand("ramify.cli.export", "write a run's rollouts or its adapter for other tools"),
    "rollback": CliCommand("ramify.cli.rollback", "continue a run from an older checkpoint, if its newest is damaged"),
    "validate": CliCommand("ramify.cli.validate", "check every task of a taskset without a model"),
    "init": CliCommand("ramify.cli.init", "write a new taskset package that works, to be changed into your own"),
    "sft": CliCommand("ramify.cli.sft", "teach a model conversations from a dataset; again to continue"),
    "orchestrator": CliCommand("ramify.cli.orchestrator", "the run's own process alone, with env servers as needed"),
    "trainer": CliCommand("ramify.cli.trainer", "the trainer alone: batches from an orchestrator, or recorded ones"),
    "serve": CliCommand("ramify.cli.serve", "serve a model over HTTP, with the native engine or vLLM"),
    "env-server": CliCommand("ramify.cli.env_server", "serve a source of rollouts from worker processes"),
    "model": CliCommand("ramify.cli.model", "models: list, show, fetch from the hub"),
    "doctor": CliCommand("ramify.cli.doctor", "what this machine can run, what is missing and how to get it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a reader that has left is no error
        return code
    except ConfigInvalid as error:
        has_own_name = (
            type(error) is not ConfigInvalid
        )  # EnvironmentChanged, say, which has an entry of its own in the docs
        print(f"{error.name}: {error.message}" if has_own_name else error, file=sys.stderr)
        return 2
    except RamifyError as error:
        print(f"{error.name}: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):  # everything that runs a model needs them: said once, here
            raise
        print(f"{error.name} is not installed; pip install 'ramify[local]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _discard_output_if_reader_gone():
            raise
        return 141


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_format_help())
        return 0
    if argv[0] == "--version":
        print(f"ramify {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean 'ramify {near[0]}'?" if near else "'ramify --help' lists the commands"
        raise ConfigInvalid(f"unknown {kind} {name!r}; {advice}")
    return import_module(COMMANDS[name].module).run(rest)


def _discard_output_if_reader_gone() -> bool:
    """Whether it is our own output whose reader has left; what is still in the buffer then goes nowhere."""
    output = sys.stdout.fileno()
    poller = select.poll()
    poller.register(output, 0)  # errors and hang-ups are told unasked
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
            "  -h, --help  show this; 'ramify COMMAND --help' shows a command's own",
            "  --version   show the version",
        ]
    )
