"""`ramify eval ID -m MODEL`: run a taskset, see what it says about the model, continue where it was left."""

import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.cli import short_flags
from ramify.config import dry_run, parse, pop_flag
from ramify.errors import StorageFull
from ramify.evals.config import EvalConfig

if TYPE_CHECKING:
    from ramify.evals.run import EvalResult

COMMAND_FLAGS = ("--fresh", "--accept-changes", "--show", "--keep", "--dry-run")
SHORT_FLAGS = {"-n": "--num_tasks", "-r": "--repetitions", "-c": "--concurrency"}
USAGE = """usage: ramify eval ID [-m MODEL] [-b URL] [-n TASKS] [-r REPETITIONS] [-c CONCURRENCY] [-o OUTPUTS]
                   [@ FILE] [--key value]

  ID            a taskset: a built-in name, an entry point, a dotted path, or a .py file
  --taskset.KEY VALUE     a key of the taskset itself; likewise --harness.KEY and --runtime.KEY
  --fresh       begin anew; the old run is moved aside
  --accept-changes        go on although the environment has changed; finished rollouts are kept, the change is recorded
  --show        print the trace of every rollout at the end
  --keep        leave the work directories where they are
  --dry-run     resolve and check everything, run nothing
  --workers N   run the rollouts in N processes instead of this one

The same command again continues the run, or says that it is finished. All keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration, fill what is missing, print the table."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
    fresh, rest = pop_flag(argv, "--fresh")
    accept, rest = pop_flag(rest, "--accept-changes")
    show, rest = pop_flag(rest, "--show")
    keep, rest = pop_flag(rest, "--keep")
    dry, rest = pop_flag(rest, "--dry-run")
    config = parse(EvalConfig, expand_arguments(rest), prog="ramify eval", command_flags=COMMAND_FLAGS)
    from ramify.evals.display import choose_display  # the rest is loaded here, not for help
    from ramify.evals.run import evaluate, find_rollouts_to_run, get_run_path, with_eval_split
    from ramify.evals.watchdog import Watchdog

    if dry:
        from ramify.evals.plan import load_plan
        from ramify.evals.policy import check_server
        from ramify.rollout import Environment

        config = with_eval_split(config)
        environment = Environment.load(config.source)
        rollouts = asyncio.run(load_plan(environment, config))
        check_server(config)
        path = get_run_path(config)
        missing_rollouts = find_rollouts_to_run(config, environment, rollouts, fresh=fresh, accept_changes=accept)
        dry_run(config, path, [f"would run {len(missing_rollouts)} rollouts of {config.taskset.get('id')} into {path}"])
        return 0
    resume_command = shlex.join(
        ["ramify", "eval", *(arg for arg in argv if arg not in ("--fresh", "--accept-changes"))]
    )
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's shell has what it starts with `&` ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    advice = (
        f"what was finished is kept. Continue with: {resume_command}\n"
        "--workers 1 runs rollouts in a process of their own, which is replaced when it hangs"
    )
    try:
        with Watchdog(config.hang_timeout, advice) as watchdog:
            result = evaluate(
                config,
                fresh=fresh,
                accept_changes=accept,
                keep_workdirs=keep,
                display=choose_display(),
                watchdog=watchdog,
            )
    except KeyboardInterrupt:
        from ramify.cli.run_lookup import describe_resume

        print(f"stopped; {describe_resume(get_run_path(with_eval_split(config)), resume_command)}", file=sys.stderr)
        return 130
    except StorageFull as error:
        raise StorageFull(f"{error.message}. Continue with: {resume_command}") from error
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    _print_result(config, result, show=show, keep=keep)
    return 1 if result.all_failed else 0


def expand_arguments(args: Sequence[str]) -> list[str]:
    """The arguments with the taskset's id and the short flags as the keys they stand for."""
    expanded = [SHORT_FLAGS.get(arg, arg) for arg in short_flags.expand_short_flags(args)]
    return ["--taskset.id", *expanded] if expanded and not expanded[0].startswith(("-", "@")) else expanded


def _print_result(config: EvalConfig, result: "EvalResult", *, show: bool, keep: bool) -> None:
    from ramify.cli.run_lookup import make_console
    from ramify.evals.report import build_report
    from ramify.evals.run import WORK_DIR
    from ramify.evals.trace_view import render_trace_tree
    from ramify.store import RunStore

    console = make_console()
    if show:
        with RunStore.open(result.path, write=False) as store:
            for trace in (trace for row in result.rows for trace in store.read_traces(row.id)):
                console.print(render_trace_tree(trace))
    if keep:
        kept = sorted((result.path / WORK_DIR).glob("*"))
        print("\n".join(f"work directory {folder}" for folder in kept) or "no rollout used a work directory")
    if not result.num_run:
        print(f"{result.path} is finished: all {len(result.rows)} rollouts are there; --fresh begins anew")
    console.print(build_report(result.rows, threshold=config.threshold))
    print(f"traces in {result.path}; see one with: ramify show {shlex.quote(str(result.path))} ROLLOUT")
