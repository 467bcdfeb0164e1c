"""`ramify rl @ config.toml`: train a model with RL, with all processes of the run; rerun to resume."""

import contextlib
import shlex
import sys
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

from ramify.cli.arguments import ConfigCall
from ramify.cli.run_lookup import describe_resume
from ramify.core.config import dry_run
from ramify.core.display import choose_display
from ramify.core.errors import CheckpointRefused, ClusterTooSmall, ConfigInvalid, RamifyError, RunBusy, RunDamaged
from ramify.launch.api import rl
from ramify.launch.cluster_placement import list_planned_nodes, place_run
from ramify.launch.completion import format_finished
from ramify.launch.dashboard import RunContent
from ramify.launch.plan import build_plan, describe_run
from ramify.launch.plan_notes import describe_step_size, list_disk_notes, list_model_notes, list_start_notes
from ramify.launch.preflight import check_start
from ramify.launch.published_weights import find_newest_weights
from ramify.launch.run_queries import describe_evals
from ramify.launch.supervisor import RunOutcome
from ramify.orchestrate.cluster_config import find_unused_keys
from ramify.orchestrate.config import RunConfig
from ramify.train.weights_directory import get_weights_directory


def run(call: ConfigCall[RunConfig]) -> int:
    """Print the plan of the run, or run it."""
    config, flags = call.config, call.flags
    if unused := find_unused_keys(config.cluster, dry_run=flags.dry_run):
        print(f"warning: without --cluster ray the run is local and ignores {', '.join(unused)}", file=sys.stderr)
    if flags.dry_run:
        return _print_plan(config, fresh=flags.fresh, accept=flags.accept_changes)
    with serve_page_of_run(config) if flags.view else contextlib.nullcontext():
        return _train(call)


def _print_plan(config: RunConfig, *, fresh: bool, accept: bool) -> int:
    """Check what the run would refuse at its start, and print its plan."""
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


def _train(call: ConfigCall[RunConfig]) -> int:
    """Run the training, print how it ended, and return the exit code."""
    config, flags, resume_command = call.config, call.flags, call.resume_command
    try:
        result = rl(
            config, fresh=flags.fresh, accept_changes=flags.accept_changes, display=choose_display(RunContent())
        )
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
    run, taskset = str(path), str(config.train[0].taskset["id"])
    commands = [["view", run], ["plot", run, "-o", "reward.png"]]
    weights = find_newest_weights(get_weights_directory(path, "disk", config.shared_path))
    if weights is not None:
        model = ["-m", str(weights)]
        commands = [["serve", *model], ["eval", taskset, *model], ["export", run, "--model", "DIR"], *commands]
    lines = [f"  {shlex.join(['ramify', *command])}" for command in commands]
    return [*([f"weights: {weights}"] if weights is not None else []), "next:", *lines]
