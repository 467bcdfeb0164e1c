"""The entry point: find the command, run it, and turn exceptions into exit codes.

A command is a line in a table. Its module is imported only when it runs, so help is fast. A module has a function
`run(argv) -> int`, which handles `--help` itself and raises named failures; a module with `run_as_process` runs that
instead if the command has the process to itself. Exit codes: 0 success, 1 a named failure, 2
an invalid command line or configuration, 130 interrupted, 141 the reader of the output is gone
(`ramify metrics RUN | head`).
"""

import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from ramify import __version__
from ramify.cli.heavy_imports import pause_garbage_collection
from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.core.names import suggest
from ramify.core.terminal import escape_output, print_exception
from ramify.processes.log import report_failure


@dataclass(frozen=True, slots=True)
class CliCommand:
    """The module of a command, and one line of help."""

    module: str
    help: str


COMMANDS: dict[str, CliCommand] = {
    "rl": CliCommand("ramify.cli.rl", "train a model with RL: starts and supervises all processes; rerun to resume"),
    "eval": CliCommand("ramify.cli.eval", "evaluate a model on a taskset; rerun to resume"),
    "view": CliCommand("ramify.cli.view", "show runs, rollouts and token trees on a local page"),
    "why": CliCommand("ramify.cli.why", "show what a run is waiting for, or how it ended; --audit checks its files"),
    "metrics": CliCommand("ramify.cli.metrics", "print the metrics of a running or finished run"),
    "plot": CliCommand("ramify.cli.plot", "plot metrics of one or more runs to an image"),
    "show": CliCommand("ramify.cli.show", "list the rollouts of a run, or print one as a tree"),
    "replay": CliCommand("ramify.cli.replay", "rescore an eval's saved rollouts with the current reward code"),
    "export": CliCommand("ramify.cli.export", "export a run's traces to JSONL or Parquet, or its model or adapter"),
    "rollback": CliCommand("ramify.cli.rollback", "resume a run from an older checkpoint, if its newest is damaged"),
    "validate": CliCommand("ramify.cli.validate", "check every task of a taskset, without a model"),
    "init": CliCommand("ramify.cli.init", "create a taskset package from a working template"),
    "sft": CliCommand("ramify.cli.sft", "fine-tune a model on conversations (SFT); rerun to resume"),
    "orchestrator": CliCommand("ramify.cli.orchestrator", "run only the orchestrator, plus env servers as needed"),
    "trainer": CliCommand("ramify.cli.trainer", "run only the trainer, on batches from an orchestrator or a recording"),
    "serve": CliCommand("ramify.cli.serve", "serve a model over HTTP, with the native engine or vLLM"),
    "env-server": CliCommand("ramify.cli.env_server", "serve one source: rollouts in worker processes"),
    "slurm": CliCommand("ramify.cli.slurm", "write (--submit: submit) a batch script that runs rl on nodes of Slurm"),
    "k8s": CliCommand("ramify.cli.k8s", "print a manifest that runs rl on Kubernetes, as a RayJob"),
    "env": CliCommand("ramify.cli.env", "install an environment for sources that need other packages, or list them"),
    "model": CliCommand("ramify.cli.model", "list, inspect or fetch models"),
    "runtime": CliCommand("ramify.cli.runtime", "list what runtimes enforce here, or clean up what earlier runs left"),
    "doctor": CliCommand("ramify.cli.doctor", "check what this machine can run, and how to install what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. No text that it prints can control the terminal."""
    sys.excepthook = print_exception
    with escape_output():
        return _run_with_exit_code(argv)


def _run_with_exit_code(argv: Sequence[str] | None) -> int:
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
        from ramify.core.config import COMMAND_HINTS  # help does not load pydantic

        similar = suggest(name, COMMANDS, "'ramify --help' lists the commands", "'ramify {}'")
        advice = COMMAND_HINTS.get(name, similar)
        raise ConfigInvalid(f"unknown {kind} {name!r}; {advice}")
    try:
        with pause_garbage_collection():
            module = import_module(COMMANDS[name].module)
        return getattr(module, "run_as_process", module.run)(rest) if owns_process else module.run(rest)
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
