"""`ramify eval ID -m MODEL`: evaluate a model on a taskset; rerun to resume."""

import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.cli.parser import format_resume_command
from ramify.cli.short_flags import SHORT_FLAGS, expand_short_flags, expand_taskset_id
from ramify.core.config import add_origins, dry_run, parse, pop_flags, read_top_level_keys
from ramify.core.display import choose_display
from ramify.core.errors import ConfigInvalid, StorageFull
from ramify.core.names import format_count
from ramify.processes.interpreter import find_other_interpreter, run_command_in
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.runtime.bwrap import describe_fallback

if TYPE_CHECKING:
    from ramify.rollout.evals.crash_report import CrashReporter
    from ramify.rollout.evals.run import EvalResult

COMMAND_FLAGS = ("--fresh", "--accept-changes", "--show-traces", "--keep-workdirs", "--dry-run")
EVAL_SHORT_FLAGS = {**SHORT_FLAGS, "-n": "--num_tasks", "-r": "--repetitions", "-c": "--concurrency"}
USAGE = """usage: ramify eval ID [-m MODEL] [-b URL] [-n TASKS] [-r REPETITIONS] [-c CONCURRENCY] [-o OUTPUTS]
                   [@ FILE] [--key value]

  ID            a taskset: a built-in name, an entry point, an import path, or a .py file
  --taskset.KEY VALUE     a key of the taskset itself; likewise --harness.KEY and --runtime.KEY
  --fresh       start over; the old run directory is renamed
  --accept-changes        resume although the environment has changed; keep finished rollouts, record the change
  --show-traces           print the trace of every rollout at the end
  --keep-workdirs         do not delete work directories
  --dry-run     check the configuration and exit
  --workers N   run the rollouts in N worker processes instead of this process

Rerun the same command to resume the run. Keys:
"""


def run_as_process(argv: Sequence[str]) -> int:
    """Do what `run` does in a child process, and report if environment code ends it."""
    from ramify.rollout.evals.crash_report import CrashReporter

    reporter = CrashReporter()
    if (exit_code := reporter.fork()) is not None:
        return exit_code
    try:
        return run(argv, reporter)
    finally:
        reporter.set_finished()


def run(argv: Sequence[str], crash_reporter: "CrashReporter | None" = None) -> int:
    """Read the configuration, run the missing rollouts, and print the report."""
    (fresh, accept, show, keep, dry), rest = pop_flags(argv, COMMAND_FLAGS)
    args = expand_arguments(rest)
    if "train" in read_top_level_keys(EvalConfig, args):
        raise ConfigInvalid(
            "the file is a configuration of `ramify rl`, since it has a `train` table; `ramify eval` expects the "
            "tables of one source, such as [taskset] and [harness], at the top level"
        )
    config = parse(EvalConfig, args, prog="ramify eval", usage=USAGE, command_flags=COMMAND_FLAGS)
    if (python := find_other_interpreter(config.python)) is not None:
        if crash_reporter is not None:
            crash_reporter.set_finished()  # the command in the other interpreter has a reporter of its own
        run_command_in(python, "eval", argv)
    if note := describe_fallback(config.runtime):
        print(f"note: runtime: {note}", file=sys.stderr)
    with add_origins(EvalConfig, args, argv):
        if dry:
            return _print_plan(config, fresh=fresh, accept=accept)
        return _evaluate(config, argv, crash_reporter, fresh=fresh, accept=accept, show=show, keep=keep)


def _print_plan(config: EvalConfig, *, fresh: bool, accept: bool) -> int:
    """Check what the evaluation would refuse at its start, and print how many rollouts it would run."""
    from ramify.rollout import Environment
    from ramify.rollout.evals.plan import load_plan  # loaded here, not for help
    from ramify.rollout.evals.policy import check_server
    from ramify.rollout.evals.run import find_rollouts_to_run, get_run_path, with_eval_split

    config = with_eval_split(config)
    environment = Environment.load(config.source)
    rollouts = asyncio.run(load_plan(environment, config))
    check_server(config, environment)
    path = get_run_path(config)
    missing_rollouts = asyncio.run(
        find_rollouts_to_run(config, environment, rollouts, fresh=fresh, accept_changes=accept)
    )
    rollouts = format_count(len(missing_rollouts), "rollout")
    dry_run(config, path, [f"would run {rollouts} of {config.taskset.get('id')} into {path}"])
    return 0


def _evaluate(
    config: EvalConfig,
    argv: Sequence[str],
    crash_reporter: "CrashReporter | None",
    *,
    fresh: bool,
    accept: bool,
    show: bool,
    keep: bool,
) -> int:
    """Run the missing rollouts, print the report, and return the exit code."""
    from ramify.rollout.evals.display import EvalContent  # loaded here, not for help
    from ramify.rollout.evals.run import evaluate, get_run_path, with_eval_split
    from ramify.rollout.evals.watchdog import Watchdog

    resume_command = format_resume_command("eval", argv)
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a script's shell for commands started with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    advice = (
        f"finished rollouts are kept; resume with: {resume_command}\n"
        "with --workers 1 rollouts run in a separate process, which is replaced if it hangs"
    )
    try:
        with Watchdog(config.hang_timeout, advice, crash_reporter) as watchdog:
            result = evaluate(
                config,
                fresh=fresh,
                accept_changes=accept,
                keep_workdirs=keep,
                display=choose_display(EvalContent()),
                watchdog=watchdog,
            )
    except KeyboardInterrupt:
        from ramify.cli.run_lookup import describe_resume

        print(f"interrupted; {describe_resume(get_run_path(with_eval_split(config)), resume_command)}", file=sys.stderr)
        return 130
    except StorageFull as error:
        raise StorageFull(f"{error.message}; resume with: {resume_command}") from error
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    _print_result(config, result, show=show, keep=keep)
    return 1 if result.all_failed else 0


def expand_arguments(args: Sequence[str]) -> list[str]:
    """Return the arguments with short flags and a leading taskset id replaced by their keys."""
    return expand_taskset_id(expand_short_flags(args, EVAL_SHORT_FLAGS))


def _print_result(config: EvalConfig, result: "EvalResult", *, show: bool, keep: bool) -> None:
    from ramify.core.console import make_console
    from ramify.rollout.evals.report import build_report
    from ramify.rollout.evals.trace_view import render_trace_tree
    from ramify.run.store import RunStore

    console = make_console()
    workdirs: list[str] = []
    if show or keep:
        with RunStore.open(result.path, write=False) as store:
            for trace in (trace for row in result.rows for trace in store.read_traces(row.id)):
                workdirs += trace.info.get("kept_workdirs", [])
                if show:
                    console.print(render_trace_tree(trace, images=store.images))
    if keep:
        print("\n".join(f"work directory {workdir}" for workdir in workdirs) or "no rollout used a work directory")
    if not result.num_run:
        rollouts = format_count(len(result.rows), "rollout")
        print(f"{result.path} is already finished ({rollouts}); use --fresh to start over")
    console.print(build_report(result.rows, pass_threshold=config.pass_threshold))
    print(f"traces in {result.path}; print one with: ramify show {shlex.quote(str(result.path))} ROLLOUT")


def _interrupt(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
