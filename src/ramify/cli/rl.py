"""`ramify rl @ config.toml`: train a model with RL, with all processes of the run; rerun to resume."""

import contextlib
import itertools
import json
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from urllib.parse import quote

from ramify.cli.parser import format_resume_command
from ramify.cli.short_flags import expand_short_flags, pop_taskset_id
from ramify.core.config import add_origins, dry_run, parse, pop_flags
from ramify.core.display import choose_display
from ramify.core.errors import CheckpointRefused, ClusterTooSmall, ConfigInvalid, RamifyError, RunBusy, RunDamaged
from ramify.orchestrate.cluster_config import find_unused_keys
from ramify.orchestrate.config import RunConfig

USAGE = """usage: ramify rl @ FILE [-m MODEL] [-b URL] [-o OUTPUTS] [--key value]
       ramify rl ID [-m MODEL] [--taskset.KEY VALUE] [--key value]

  ID            a taskset to train on, with default settings; evaluated on its eval split
  --cluster ray  run on the nodes of a Ray cluster, as `[cluster]` says or, without it, on what the cluster has
  --fresh       start over; the old run directory is renamed
  --accept-changes  resume although an environment has changed; the change is recorded
  --dry-run     check the configuration, print the plan, and exit
  --view        show the run on a local page while it runs, as `ramify view` does; its address is printed

Rerun the same command to resume the run. Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop; a second Ctrl-C stops
at once. Exit codes: 0 finished, 1 failure, 2 invalid configuration, 75 stopped, 130 interrupted.

Keys, first those that most runs set:
"""

COMMAND_FLAGS = ("--fresh", "--accept-changes", "--dry-run", "--view")


def run(argv: Sequence[str]) -> int:
    """Read the configuration, and print its plan or run it."""
    (fresh, accept, dry, view), rest = pop_flags(argv, COMMAND_FLAGS)
    args = expand_arguments(rest)
    config = parse(RunConfig, args, prog="ramify rl", usage=USAGE, command_flags=COMMAND_FLAGS)
    if unused := find_unused_keys(config.cluster, dry_run=dry):
        print(f"warning: without --cluster ray the run is local and ignores {', '.join(unused)}", file=sys.stderr)
    with add_origins(RunConfig, args, argv):
        if dry:
            return _print_plan(config, fresh=fresh, accept=accept)
        with serve_page_of_run(config) if view else contextlib.nullcontext():
            return _train(config, argv, fresh=fresh, accept=accept)


def _print_plan(config: RunConfig, *, fresh: bool, accept: bool) -> int:
    """Check what the run would refuse at its start, and print its plan."""
    from ramify.launch.plan import build_plan, describe_run  # loaded here, not for help
    from ramify.launch.plan_notes import describe_step_size, list_disk_notes, list_model_notes, list_start_notes
    from ramify.launch.preflight import check_start

    check_start(config, fresh=fresh, accept_changes=accept)
    if config.cluster.is_distributed:
        lines = _plan_cluster(config)
        head = [describe_run(config), describe_step_size(config)]
        notes = [*list_disk_notes(config), *list_model_notes(config), *list_start_notes(config)]
        dry_run(config, config.path, [*head, *lines, *notes])
        return 0
    plan = build_plan(config, dry_run=True)
    dry_run(config, config.path, plan.format_lines(), write_files=plan.write)
    return 0


def _plan_cluster(config: RunConfig) -> list[str]:
    """Return who runs where: on the nodes of the Ray cluster or, if none answers, on those of the configuration."""
    from ramify.launch.cluster_placement import list_planned_nodes, place_run
    from ramify.launch.ray_launcher import LIST_NODES_TIMEOUT, RayLauncher, describe_joined

    cluster, planned_nodes = config.cluster, list_planned_nodes(config)
    try:
        launcher = RayLauncher.connect(cluster.address)
    except ConfigInvalid as error:
        nodes, origin = planned_nodes, f"nodes as in [cluster.node], because {error.message}"
    else:
        try:
            nodes = launcher.wait_for_nodes(1, timeout=LIST_NODES_TIMEOUT)
            usage = launcher.describe_usage(nodes)
        finally:
            launcher.disconnect()
        origin = f"nodes of the Ray cluster at {cluster.address!r}"
        if usage:
            origin = f"{origin}, planned as if they were free: {usage}"
        if missing_nodes := planned_nodes[len(nodes) :]:
            joined = describe_joined(nodes, len(planned_nodes))
            wait = f"the run would wait up to {cluster.join_timeout:g} s for the others, planned as in [cluster.node]"
            nodes, origin = [*nodes, *missing_nodes], f"{origin}; {joined}; {wait}"
    try:
        return [origin, *place_run(config, nodes).format_lines()]
    except ClusterTooSmall as error:
        raise ClusterTooSmall(f"{error.message}\n  {origin}") from error


@contextlib.contextmanager
def serve_page_of_run(config: RunConfig) -> Generator[None]:
    """Serve the page of the run's folder while the block runs. If it cannot be served, the run goes on without it."""
    from ramify.view.serving import serve_in_thread  # loaded here, not for help

    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(serve_in_thread(config.path.parent))
        except RamifyError as error:
            print(f"the run is not shown on a page: {error.name}: {error.message}", file=sys.stderr)
        else:
            print(f"the run is shown at {address}/#/run/{quote(config.path.name)}", flush=True)
        yield


def _train(config: RunConfig, argv: Sequence[str], *, fresh: bool, accept: bool) -> int:
    """Run the training, print how it ended, and return the exit code."""
    from ramify.cli.run_lookup import describe_resume
    from ramify.launch.api import rl
    from ramify.launch.completion import format_finished
    from ramify.launch.dashboard import RunContent  # the rest is loaded here, not for help
    from ramify.launch.run_queries import describe_evals
    from ramify.launch.supervisor import RunOutcome

    resume_command = format_resume_command("rl", argv)
    try:
        result = rl(config, fresh=fresh, accept_changes=accept, display=choose_display(RunContent()))
    except (CheckpointRefused, ConfigInvalid, RunBusy, RunDamaged):  # a rerun would fail too
        raise
    except RamifyError:
        print(describe_resume(config.path, resume_command), file=sys.stderr)
        raise
    match result.outcome:
        case RunOutcome.FINISHED if not result.did_run:
            steps = format_finished(result.steps, config)
            train_on = "a larger --max-steps trains on, " if result.steps >= config.max_steps else ""
            print(f"{result.path} is already finished ({steps}); {train_on}--fresh starts over")
            for line in _list_next_commands(config, result.path):
                print(line)
        case RunOutcome.FINISHED:
            with contextlib.suppress(RamifyError):  # the run is finished, whether or not its store can be read now
                for line in describe_evals(result.path):
                    print(line)
            print(f"finished: {format_finished(result.steps, config)} in {result.path}")
            for line in _list_next_commands(config, result.path):
                print(line)
        case RunOutcome.STOPPED:
            print(f"stopped; {describe_resume(result.path, resume_command)}", file=sys.stderr)
        case RunOutcome.INTERRUPTED:
            print(f"interrupted; {describe_resume(result.path, resume_command)}", file=sys.stderr)
    return result.outcome.value


def _list_next_commands(config: RunConfig, path: Path) -> list[str]:
    """Return where the trained model is, and the commands that use it."""
    from ramify.launch.published_weights import find_newest_weights
    from ramify.train.weights_directory import get_weights_directory

    run, taskset = str(path), str(config.train[0].taskset["id"])
    commands = [["view", run], ["plot", run, "-o", "reward.png"]]
    weights = find_newest_weights(get_weights_directory(path, "disk", config.shared_path))
    if weights is not None:
        model = ["-m", str(weights)]
        commands = [["serve", *model], ["eval", taskset, *model], ["export", run, "--model", "DIR"], *commands]
    lines = [f"  {shlex.join(['ramify', *command])}" for command in commands]
    return [*([f"weights: {weights}"] if weights is not None else []), "next:", *lines]


def expand_arguments(args: Sequence[str]) -> list[str]:
    """Return the arguments with short flags, `--cluster NAME` and a leading taskset id replaced by their keys."""
    id, rest = pop_taskset_id(_expand_cluster_flag(expand_short_flags(args)))
    if id is None:
        return rest
    taskset = {"id": id}
    train, evals = [{"taskset": taskset}], [{"taskset": {**taskset, "split": "eval"}}]
    return [f"--train={json.dumps(train)}", f"--eval={json.dumps(evals)}", *_apply_to_train_and_eval(rest)]


def _expand_cluster_flag(args: Sequence[str]) -> list[str]:
    """Return the arguments with `--cluster NAME` replaced by `--cluster.launcher NAME`. Raises ConfigInvalid."""
    expanded = list(args)
    for index, (arg, value) in enumerate(itertools.pairwise([*args, "@"])):
        if arg != "--cluster" or value.startswith("{"):
            continue
        if value.startswith(("-", "@")):
            raise ConfigInvalid("--cluster: expected ray, got no value; without the flag the run is local")
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
