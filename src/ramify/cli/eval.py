"""`ramify eval ID -m MODEL`: evaluate a model on a taskset; rerun to resume."""

import asyncio
import shlex
import signal
import sys

from ramify.cli.arguments import ConfigCall
from ramify.cli.run_lookup import describe_resume
from ramify.cli.trace_tree import render_trace_tree
from ramify.core.config import dry_run
from ramify.core.console import make_console
from ramify.core.display import choose_display
from ramify.core.errors import StorageFull
from ramify.core.names import format_count
from ramify.processes.interpreter import find_other_interpreter, run_command_in
from ramify.rollout import Environment
from ramify.rollout.evals.blocked_loop import LoopWatchdog
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.evals.plan import load_plan
from ramify.rollout.evals.policy_client import check_served_model, check_server, list_model_notes
from ramify.rollout.evals.progress import EvalContent
from ramify.rollout.evals.report import build_report
from ramify.rollout.evals.run import (
    EvalResult,
    evaluate,
    find_rollouts_to_run,
    get_run_path,
    pin_eval_dataset,
    with_eval_split,
)
from ramify.rollout.runtime.bwrap import describe_fallback
from ramify.run.store import RunStore


def run(call: ConfigCall[EvalConfig]) -> int:
    """Run the missing rollouts, and print the report."""
    config, flags = call.config, call.flags
    if (python := find_other_interpreter(config.python)) is not None:
        if call.crash_reporter is not None:
            call.crash_reporter.set_finished()  # the command in the other interpreter has a reporter of its own
        run_command_in(python, "eval", call.argv)
    if note := describe_fallback(config.runtime):
        print(f"note: runtime: {note}", file=sys.stderr)
    return _print_plan(config, fresh=flags.fresh, accept=flags.accept_changes) if flags.dry_run else _evaluate(call)


def _print_plan(config: EvalConfig, *, fresh: bool, accept: bool) -> int:
    """Check what the evaluation would refuse at its start, and print how many rollouts it would run."""
    check_served_model(config, fetch=False)
    config = with_eval_split(pin_eval_dataset(config, fresh=fresh, accept_changes=accept, log=None))
    environment = Environment.load(config.source)
    rollouts = asyncio.run(load_plan(environment, config))
    check_server(config, environment)
    path = get_run_path(config)
    missing_rollouts = asyncio.run(
        find_rollouts_to_run(config, environment, rollouts, fresh=fresh, accept_changes=accept)
    )
    rollouts = format_count(len(missing_rollouts), "rollout")
    plan = f"would run {rollouts} of {config.taskset.get('id')} into {path}"
    dry_run(config, path, [plan, *list_model_notes(config)])
    return 0


def _evaluate(call: ConfigCall[EvalConfig]) -> int:
    """Run the missing rollouts, print the report, and return the exit code."""
    config, flags, resume_command = call.config, call.flags, call.resume_command
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a script's shell for commands started with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    advice = (
        f"finished rollouts are kept; resume with: {resume_command}\n"
        "with --workers 1 rollouts run in a separate process, which is replaced if it hangs"
    )
    try:
        with LoopWatchdog(config.hang_timeout, advice, call.crash_reporter) as watchdog:
            result = evaluate(
                config,
                fresh=flags.fresh,
                accept_changes=flags.accept_changes,
                keep_workdirs=flags.keep_workdirs,
                display=choose_display(EvalContent()),
                watchdog=watchdog,
            )
    except KeyboardInterrupt:
        print(f"interrupted; {describe_resume(get_run_path(with_eval_split(config)), resume_command)}", file=sys.stderr)
        return 130
    except StorageFull as error:
        raise StorageFull(f"{error.message}; resume with: {resume_command}") from error
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    _print_result(config, result, show=flags.show_traces, keep=flags.keep_workdirs)
    return 1 if result.all_failed else 0


def _print_result(config: EvalConfig, result: EvalResult, *, show: bool, keep: bool) -> None:
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
