"""The Python API of training: `rf.rl` and `rf.sft`."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ramify.core.config import expand_model_name, get_explicit_values, parse_section
from ramify.core.display import choose_api_display
from ramify.core.hub import print_to_stderr
from ramify.env import Taskset
from ramify.env.taskset_id import build_taskset_table
from ramify.infer.config import expand_run_models
from ramify.launch.pinned_datasets import pin_datasets
from ramify.launch.plan import build_plan
from ramify.launch.plugin_check import check_plugin_tables, check_sft_evals
from ramify.launch.run_checks import check_run, list_start_notes
from ramify.launch.sft_evals import RolloutEvals
from ramify.orchestrate.run_config import RunConfig
from ramify.run.supervisor_lock import lock_run
from ramify.train.sft.config import SftConfig

if TYPE_CHECKING:
    from ramify.launch.dashboard import RunDisplay
    from ramify.launch.execution import RunResult
    from ramify.launch.launcher import ClusterNode, Launcher
    from ramify.train.sft.display import SftDisplay
    from ramify.train.sft.run import SftResult


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
    from ramify.launch.dashboard import RunContent  # loaded only where it is needed

    run_config = expand_run_models(_build_config(config, settings))
    display = display or choose_api_display(RunContent())
    # A run whose directory exists is locked before the checks, so that `ramify why` shows it as starting. A new one is
    # locked after them: a configuration that is refused leaves no files.
    is_locked = run_config.path.exists()
    with contextlib.ExitStack() as stack:
        if is_locked:
            stack.enter_context(lock_run(run_config.path))
        check_run(run_config)
        run_config = pin_datasets(run_config, fresh=fresh, accept_changes=accept_changes, log=print_to_stderr)
        is_distributed = run_config.cluster.is_distributed
        environments = check_plugin_tables(run_config) if is_distributed else {}  # before the wait for nodes
        launcher, nodes = stack.enter_context(open_launcher(run_config, display.print_line))
        plan = build_plan(run_config, nodes, fresh=fresh)
        stack.enter_context(launcher.prepare(plan.process_specs))
        if not is_distributed:
            environments = check_plugin_tables(run_config)  # while the modules of the processes are imported
        for note in list_start_notes(run_config):
            display.print_line(note)
        from ramify.launch.execution import execute_plan

        return execute_plan(
            plan,
            fresh=fresh,
            accept_changes=accept_changes,
            environments=environments,
            display=display,
            launcher=launcher,
            is_locked=is_locked,
        )


def sft(
    config: SftConfig | Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
    display: "SftDisplay | None" = None,
    **settings: Any,
) -> "SftResult":
    """Train a model on conversations, or resume such a run. `settings` are further keys of `config`.

    `data` may be the path of a file. If `fresh`, the run starts over. The function may be called inside a running event
    loop (in a notebook), plainly or with `await`, and blocks in both cases. `display` shows the progress.
    """
    from ramify.train.sft.display import SftContent  # loaded only where it is needed
    from ramify.train.sft.pinned_data import pin_sft_datasets
    from ramify.train.sft.run import run_sft

    if settings or not isinstance(config, SftConfig):
        keys = get_explicit_values(config) if isinstance(config, SftConfig) else config or {}
        table = expand_model_name({**keys, **settings})
        if isinstance(table.get("data"), str | Path):
            table["data"] = {"path": str(table["data"])}
        if "eval" in table:
            output = Path(table.get("output", "outputs"))
            table["eval"] = [_with_taskset_table(source, output) for source in table["eval"]]
        config = parse_section(SftConfig, table, key="sft")
    config = pin_sft_datasets(expand_run_models(config), fresh=fresh, log=print_to_stderr)
    check_sft_evals(config)
    display = display or choose_api_display(SftContent())
    return run_sft(config, fresh=fresh, display=display, evals=RolloutEvals.from_config(config))


@contextlib.contextmanager
def open_launcher(
    config: RunConfig, print_line: Callable[[str], None] = print
) -> "Generator[tuple[Launcher, list[ClusterNode]]]":
    """Yield the launcher of a run, and the nodes on which it starts processes."""
    if not config.cluster.is_distributed:
        from ramify.launch.local_launcher import LocalLauncher

        local = LocalLauncher(config.path / "configs")
        yield local, local.list_nodes()
        return
    from ramify.launch.ray_launcher import RayLauncher

    cluster = config.cluster
    launcher = RayLauncher.connect(cluster.address, gpu_bytes=cluster.node.gpu_bytes)
    try:
        nodes = launcher.wait_for_nodes(cluster.num_nodes or 1, timeout=cluster.join_timeout, print_line=print_line)
        if usage := launcher.describe_usage(nodes):
            print_line(f"{usage}; a process without room waits up to {config.launch.startup_timeout:g} s")
        yield launcher, nodes
    finally:
        launcher.disconnect(print_line)


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
