"""The Python API of a training run: check the configuration, build the plan, execute it."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ramify.config import expand_model_name, get_explicit_values, parse_section
from ramify.display import choose_api_display
from ramify.env import Taskset
from ramify.env.taskset_id import build_taskset_table
from ramify.launch.plan import build_plan
from ramify.launch.plugin_check import check_plugin_tables
from ramify.launch.process import prefork_shared_modules
from ramify.launch.run_lock import lock_run
from ramify.orchestrate.config import RunConfig

if TYPE_CHECKING:
    from ramify.launch.dashboard import RunDisplay
    from ramify.launch.execution import RunResult


def rl(
    config: RunConfig | Mapping[str, Any] | Taskset | type[Taskset] | str,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    display: "RunDisplay | None" = None,
    **settings: Any,
) -> "RunResult":
    """Train until `max_steps`, or resume a run. `fresh` starts over. Raises the failure that ends the run.

    `config` is a configuration, a table of settings, or a taskset to train on: its class, an instance, or its id; its
    eval split is evaluated. `settings` are further keys of the table. The call blocks until the run ends, also inside a
    running event loop (in a notebook), and its result may be awaited. `display` shows the progress.
    An environment that has changed since the run was started raises EnvironmentChanged, unless `accept_changes`.
    """
    run_config = _build_config(config, settings)
    # A run whose directory exists is locked before the checks, so that `ramify why` shows it as starting. A new one is
    # locked after them: a configuration that is refused leaves no files.
    is_locked = run_config.path.exists()
    run = _run_on_cluster if run_config.cluster.is_distributed else _run_on_machine
    with lock_run(run_config.path) if is_locked else contextlib.nullcontext():
        return run(run_config, fresh=fresh, accept_changes=accept_changes, display=display, is_locked=is_locked)


def _run_on_machine(
    config: RunConfig, *, fresh: bool, accept_changes: bool, display: "RunDisplay | None", is_locked: bool
) -> "RunResult":
    """Run on this machine."""
    plan = build_plan(config)
    with prefork_shared_modules(plan.process_specs) as prefork_client:  # it imports modules during the checks below
        from ramify.launch.dashboard import RunContent
        from ramify.launch.execution import execute_plan
        from ramify.launch.local_launcher import LocalLauncher

        return execute_plan(
            plan,
            fresh=fresh,
            accept_changes=accept_changes,
            environments=check_plugin_tables(config),
            display=display or choose_api_display(RunContent()),
            launcher=LocalLauncher(prefork_client=prefork_client),
            is_locked=is_locked,
        )


def _run_on_cluster(
    config: RunConfig, *, fresh: bool, accept_changes: bool, display: "RunDisplay | None", is_locked: bool
) -> "RunResult":
    """Run on the nodes of the cluster that the configuration names; this machine is the head."""
    from ramify.launch.cluster_plan import build_cluster_plan  # loaded only where they are needed
    from ramify.launch.dashboard import RunContent
    from ramify.launch.execution import execute_plan
    from ramify.launch.ray_launcher import RayLauncher

    cluster, display = config.cluster, display or choose_api_display(RunContent())
    launcher = RayLauncher.connect(cluster.address)
    try:
        nodes = launcher.wait_for_nodes(
            cluster.num_nodes or 1, timeout=cluster.join_timeout, print_line=display.print_line
        )
        if usage := launcher.describe_usage(nodes):
            display.print_line(f"{usage}; a process without room waits up to {config.launch.startup_timeout:g} s")
        return execute_plan(
            build_cluster_plan(config, nodes),
            fresh=fresh,
            accept_changes=accept_changes,
            environments=check_plugin_tables(config),
            display=display,
            launcher=launcher,
            is_locked=is_locked,
        )
    finally:
        launcher.disconnect(display.print_line)


def _build_config(
    config: RunConfig | Mapping[str, Any] | Taskset | type[Taskset] | str, settings: Mapping[str, Any]
) -> RunConfig:
    if isinstance(config, RunConfig):
        if not settings:
            return config
        config = get_explicit_values(config)
    table = config if isinstance(config, Mapping) else {}
    output = Path({**table, **settings}.get("output", "outputs"))
    if not isinstance(config, Mapping):
        taskset = build_taskset_table(config, output)
        name = {} if isinstance(config, str) else {"name": taskset["id"].rpartition(":")[2]}
        eval_taskset = {**taskset, "split": "eval"}
        table = {"train": [{**name, "taskset": taskset}], "eval": [{**name, "taskset": eval_taskset}]}
    table = expand_model_name({**table, **settings})
    for kind in {"train", "eval"} & table.keys():
        table[kind] = [_with_taskset_table(source, output) for source in table[kind]]
    return parse_section(RunConfig, table, key="run")


def _with_taskset_table(source: Any, output: Path) -> Any:
    if not isinstance(source, Mapping):
        return source
    table = cast(Mapping[str, Any], source)
    return {**table, "taskset": build_taskset_table(table["taskset"], output)} if "taskset" in table else table
