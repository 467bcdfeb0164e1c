"""`ramify rl @ config.toml`: a whole run, from its processes to its last checkpoint; again to continue."""

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence

from ramify.cli import short_flags
from ramify.config import Config, dry_run, parse, pop_flag
from ramify.errors import CheckpointRefused, ConfigInvalid, RamifyError, RunBusy, RunDamaged
from ramify.orchestrate.config import EvalSourceConfig, RunConfig, TrainSourceConfig

USAGE = """usage: ramify rl @ FILE [-m MODEL] [-b URL] [-o OUTPUTS] [--key value]
       ramify rl ID [-m MODEL] [--taskset.KEY VALUE] [--key value]

  ID            a taskset to learn, with nothing said about it but its own keys; measured on its eval split
  --fresh       begin anew; the old run is moved aside
  --accept-changes  go on although an environment has changed; the change is recorded
  --dry-run     resolve and check everything, print the plan, start nothing

The same command again continues the run, or says that it is finished. Ctrl-C ends it at once; SIGTERM and SIGUSR1 make
a checkpoint first and exit with 75. Exit codes: 0 finished, 1 a named failure, 2 configuration, 75 left, 130
interrupted.

{train}

{eval}

All other keys:
"""

COMMAND_FLAGS = ("--fresh", "--accept-changes", "--dry-run")


def run(argv: Sequence[str]) -> int:
    """Read the configuration, and plan or run it."""
    if "--help" in argv or "-h" in argv:
        print(_format_usage())
    fresh, rest = pop_flag(argv, "--fresh")
    accept, rest = pop_flag(rest, "--accept-changes")
    dry, rest = pop_flag(rest, "--dry-run")
    config = parse(RunConfig, expand_arguments(rest), prog="ramify rl", command_flags=COMMAND_FLAGS)
    if dry:
        from ramify.launch.plan import build_plan
        from ramify.launch.preflight import check_start

        plan = build_plan(config, dry_run=True)
        check_start(config, fresh=fresh, accept_changes=accept)
        dry_run(config, config.path, plan.format_lines(), write_files=plan.write)
        return 0
    from ramify.cli.run_lookup import describe_resume
    from ramify.launch.api import rl
    from ramify.launch.completion import format_finished
    from ramify.launch.dashboard import choose_display  # the rest is loaded here, not for help
    from ramify.launch.supervisor import RunOutcome

    resume_command = shlex.join(["ramify", "rl", *(arg for arg in argv if arg not in ("--fresh", "--accept-changes"))])
    try:
        ended = rl(config, fresh=fresh, accept_changes=accept, display=choose_display())
    except RamifyError as error:
        if not isinstance(
            error, CheckpointRefused | ConfigInvalid | RunBusy | RunDamaged
        ):  # the same command would fail again
            print(describe_resume(config.path, resume_command), file=sys.stderr)
        raise
    where = shlex.quote(str(ended.path))
    match ended.outcome:
        case RunOutcome.FINISHED if not ended.did_run:
            print(f"{ended.path} is finished: {format_finished(ended.steps, config)}; --fresh begins anew")
        case RunOutcome.FINISHED:
            print(
                f"done: {format_finished(ended.steps, config)}, in {ended.path}; see it with: ramify "
                f"plot {where} -o reward.png"
            )
        case RunOutcome.STOPPED:
            print(f"left. Continue with: {resume_command}", file=sys.stderr)
        case RunOutcome.INTERRUPTED:
            print(f"stopped; {describe_resume(ended.path, resume_command)}", file=sys.stderr)
    return ended.outcome.value


def _format_usage() -> str:
    """With the keys of the sources, which stand in lists: the page of all keys does not look into those."""

    def format_keys(kind: str, source: type[Config]) -> str:
        return textwrap.fill(f"Keys of [[{kind}]]: {', '.join(source.model_fields)}.", width=120)

    return USAGE.format(train=format_keys("train", TrainSourceConfig), eval=format_keys("eval", EvalSourceConfig))


def expand_arguments(args: Sequence[str]) -> list[str]:
    """The arguments with the taskset's id and the short flags as the keys they stand for."""
    rest = short_flags.expand_short_flags(args)
    if not rest or rest[0].startswith(("-", "@")):
        return rest
    taskset = {"id": rest.pop(0)}
    train, evals = [{"taskset": taskset}], [{"taskset": {**taskset, "split": "eval"}}]
    return [f"--train={json.dumps(train)}", f"--eval={json.dumps(evals)}", *_apply_to_train_and_eval(rest)]


def _apply_to_train_and_eval(args: Sequence[str]) -> list[str]:
    """`--taskset.KEY` is said of what is learnt and of what is measured."""
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
