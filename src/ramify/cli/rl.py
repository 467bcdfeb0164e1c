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
from ramify.core.errors import (
    CheckpointRefused,
    ClusterTooSmall,
    ConfigInvalid,
    ModelNotFound,
    ModelUnsupported,
    RamifyError,
    RunBusy,
    RunDamaged,
)
from ramify.launch.dashboard import RunContent
from ramify.launch.demands import list_planned_nodes
from ramify.launch.launcher import ClusterNode
from ramify.launch.machine import assume_machine, describe_machine
from ramify.launch.pinned_datasets import pin_datasets
from ramify.launch.plan import format_plan, plan_run, write_plan
from ramify.launch.published_weights import find_newest_weights
from ramify.launch.python_api import rl
from ramify.launch.run_checks import check_dry_run
from ramify.launch.run_directory import format_finished
from ramify.launch.supervisor import RunOutcome
from ramify.orchestrate.cluster_config import find_unused_keys
from ramify.orchestrate.run_config import RunConfig
from ramify.rollout.evals.stats import format_score
from ramify.run.store import RunStore
from ramify.run.store.run_log import MetricPoint, RunLog
from ramify.train.weights_directory import get_weights_directory


def run(call: ConfigCall[RunConfig]) -> int:
    """Print the plan of the run, or run it."""
    config, flags = call.config, call.flags
    if flags.assume_gpus and not flags.dry_run:
        raise ConfigInvalid("--assume-gpus: only with --dry-run; a run uses the GPUs of this machine")
    if unused := find_unused_keys(config.cluster):
        print(f"warning: without --cluster ray the run is local and ignores {', '.join(unused)}", file=sys.stderr)
    if flags.dry_run:
        return _print_plan(config, fresh=flags.fresh, accept=flags.accept_changes, assumed_gpus=flags.assume_gpus)
    with serve_page_of_run(config) if flags.view else contextlib.nullcontext():
        return _train(call)


def _print_plan(config: RunConfig, *, fresh: bool, accept: bool, assumed_gpus: str | None) -> int:
    """Check what the run would refuse at its start, and print its plan."""
    config = pin_datasets(config, fresh=fresh, accept_changes=accept, log=None)
    check_dry_run(config, fresh=fresh, accept_changes=accept)
    nodes, origin = _list_nodes(config, assumed_gpus)
    try:
        planned, placement = plan_run(config, nodes, fresh=fresh)
    except ClusterTooSmall as error:
        raise ClusterTooSmall(f"{error.message}\n  {origin}" if origin else error.message) from error
    lines = format_plan(planned, placement, origin, fresh=fresh)
    dry_run(config, config.path, lines, write_files=lambda: write_plan(config, planned, placement))
    return 0


def _list_nodes(config: RunConfig, assumed_gpus: str | None) -> tuple[list[ClusterNode], str]:
    """Return the nodes that a run is planned for, and where they come from unless they are this machine.

    These are this machine or one that is assumed; with a launcher, the nodes of the Ray cluster or, if none answers,
    the nodes that `[cluster.node]` describes.
    """
    cluster = config.cluster
    if assumed_gpus is not None:
        if cluster.is_distributed:
            raise ConfigInvalid("--assume-gpus: not allowed with --cluster; set [cluster.node]")
        return [assume_machine(assumed_gpus)], f"planned for an assumed machine, {assumed_gpus} GiB of GPUs"
    if not cluster.is_distributed:
        machine = describe_machine()
        if machine.num_gpus or "cuda" not in (config.trainer.device, getattr(config.inference, "device", "auto")):
            return [machine], ""
        launch = config.launch
        num_each = (launch.trainer_gpus or 1, launch.inference_gpus or getattr(config.inference, "tensor_parallel", 1))
        assumed_gpus = f"{sum(num_each) if launch.gpu_placement == 'split' else max(num_each)}x80"
        origin = f"no GPU is here: planned for an assumed machine, {assumed_gpus} GiB of GPUs"
        return [assume_machine(assumed_gpus)], origin
    from ramify.launch.ray_launcher import LIST_NODES_TIMEOUT, RayLauncher, describe_joined

    planned_nodes = list_planned_nodes(config)
    try:
        launcher = RayLauncher.connect(cluster.address, gpu_bytes=cluster.node.gpu_bytes)
    except ConfigInvalid as error:
        return planned_nodes, f"nodes as in [cluster.node], because {error.message}"
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
        return [*nodes, *missing_nodes], f"{origin}; {joined}; {wait}"
    return nodes, origin


@contextlib.contextmanager
def serve_page_of_run(config: RunConfig) -> Generator[None]:
    """Serve the page of the run's folder while the block runs. If it cannot be served, the run goes on without it."""
    from ramify.view.server import serve_in_thread  # loaded here, not for help

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
    except (CheckpointRefused, ConfigInvalid, ModelNotFound, ModelUnsupported, RunBusy, RunDamaged):
        raise  # a rerun would fail too
    except RamifyError:
        print(describe_resume(config.path, resume_command), file=sys.stderr)
        raise
    if result.outcome is not RunOutcome.FINISHED:
        ending = result.outcome.name.lower()
        print(f"{ending}; {describe_resume(result.path, resume_command)}", file=sys.stderr)
        return result.outcome.value
    steps = format_finished(result.steps, config)
    if result.did_run:
        with contextlib.suppress(RamifyError):  # the run is finished, whether or not its store can be read now
            for line in _describe_evals(result.path):
                print(line)
        print(f"finished: {steps} in {result.path}")
    else:
        train_on = "a larger --max-steps trains on, " if result.steps >= config.max_steps else ""
        print(f"{result.path} is already finished ({steps}); {train_on}--fresh starts over")
    for line in _list_next_commands(config, result.path):
        print(line)
    return result.outcome.value


def _describe_evals(path: Path) -> list[str]:
    """Return, for each eval of a run that does not run now, a line with its first and its last mean reward."""
    with RunStore.open(path, write=False) as store:
        points = RunLog(store).metrics("eval/*/avg")
    points_by_name: dict[str, list[MetricPoint]] = {}
    for point in points:
        points_by_name.setdefault(point.name.removesuffix("/avg"), []).append(point)
    lines: list[str] = []
    for name, (first, *others) in points_by_name.items():
        changes = [f" -> {format_score(others[-1].value)} at step {others[-1].step}"] if others else []
        lines.append("".join([f"{name}: {format_score(first.value)} at step {first.step}", *changes]))
    return lines


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
