"""`ramify orchestrator @ run.toml`: run only the orchestrator, plus env servers for sources without an address."""

import asyncio
import os
import sys
from collections.abc import Mapping

from ramify.cli.arguments import ConfigCall
from ramify.core.display import LogDisplay
from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.infer.config import ExternalServersConfig
from ramify.launch.sink_threads import check_sinks_installed
from ramify.orchestrate.run_config import RunConfig
from ramify.trace import Trace


def run(call: ConfigCall[RunConfig]) -> int:
    """Run the orchestrator until the run ends."""
    config, dry, accept = call.config, call.flags.dry_run, call.flags.accept_changes
    if not isinstance(config.inference, ExternalServersConfig):
        message = "the orchestrator does not start an engine; give the address of a running one with -b URL"
        raise ConfigInvalid(message, key="inference")
    if managed := [f"models.{name}.base_url" for name, model in config.all_models.items() if model.is_managed]:
        raise ConfigInvalid(problems=[(key, "the orchestrator starts no engine; set its address") for key in managed])
    check_sinks_installed(config)
    if any(source.address is None for source in (*config.train, *config.eval)):
        return _run_with_env_servers(config, dry=dry, accept=accept)
    if dry:
        steps = format_count(config.max_steps, "step")
        print(f"would orchestrate {config.path}: {steps}, {format_count(len(config.train), 'train source')}")
        return 0
    return _run_in_process(config, accept=accept)


def _run_with_env_servers(config: RunConfig, *, dry: bool, accept: bool) -> int:
    """Start the orchestrator and the env servers as child processes, and supervise them."""
    from ramify.launch.dashboard import RunContent
    from ramify.launch.execution import execute_plan
    from ramify.launch.local_launcher import LocalLauncher
    from ramify.launch.machine import describe_machine
    from ramify.launch.plan import build_orchestrator_plan, format_plan
    from ramify.launch.plugin_check import check_plugin_tables
    from ramify.launch.run_directory import format_finished

    launcher = LocalLauncher(config.path / "configs")
    plan = build_orchestrator_plan(config, [describe_machine(gpus=[])])
    environments = check_plugin_tables(config)
    if dry:
        print("\n".join(format_plan(config, plan.placement)))
        return 0
    print(f"trainer address {plan.orchestrator_address}, status {plan.status_address}", flush=True)
    with launcher.prepare(plan.process_specs):
        result = execute_plan(
            plan,
            accept_changes=accept,
            environments=environments,
            display=LogDisplay(RunContent()),
            launcher=launcher,
        )
    if not result.did_run:
        print(f"{result.path} is already finished ({format_finished(result.steps, config)})")
    return result.outcome.value


def _run_in_process(config: RunConfig, *, accept: bool) -> int:
    from ramify.launch.head import prepare_head, read_local_state
    from ramify.launch.metric_sinks import build_samples
    from ramify.launch.run_directory import format_finished, mark_finished, prepare_run_directory
    from ramify.launch.sink_threads import open_monitor_sinks
    from ramify.orchestrate.orchestrator import Orchestrator
    from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE
    from ramify.run.state import SupervisorState
    from ramify.run.store.image_store import MEDIA_DIR, ImageStore

    images = ImageStore(config.path / MEDIA_DIR)

    def log_samples(step: int, rollouts: Mapping[str, list[tuple[Trace, float | None]]]) -> None:
        samples = [
            sample
            for source, source_rollouts in rollouts.items()
            for trace, advantage in source_rollouts
            for sample in build_samples(trace, source=source, advantage=advantage, images=images)
        ]
        monitors.log_samples(step, samples)

    # A supervisor records the address, saves the last weights, and only then that the run is finished.
    is_supervised = RESERVED_PORTS_VARIABLE in os.environ

    def record_status_address(url: str) -> None:
        if not is_supervised:
            SupervisorState.begin(config.path, url).write(config.path)

    if config.shared_path is not None and read_local_state(config.path) is None:  # a supervisor has done this before
        prepare_head(config, accept_changes=accept or None)
    steps = prepare_run_directory(config, accept_changes=accept or None)  # a supervisor has checked this before
    if steps is not None:
        print(f"{config.path} is already finished ({format_finished(steps, config)})")
        return 0
    make_print_atomic()
    monitors = open_monitor_sinks(config, lambda line: print(line, flush=True))
    try:
        orchestrator = Orchestrator(
            config, on_metrics=monitors.log_metrics, on_samples=log_samples, on_status_address=record_status_address
        )
        exit_code = asyncio.run(orchestrator.run())
    finally:
        monitors.close()
    if exit_code == 0 and not is_supervised:
        mark_finished(config)
    return exit_code


def make_print_atomic() -> None:
    """Keep lines of several threads apart: unbuffered, a line and its newline are two writes."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(write_through=False)
