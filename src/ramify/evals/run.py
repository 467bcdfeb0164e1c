"""An eval from its configuration to its result: open the run, find what is missing, fill it, say what it means."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.config import write_toml
from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.errors import ProviderError
from ramify.evals.bounds import reward_bounds
from ramify.evals.config import EvalConfig
from ramify.evals.display import REFRESH_INTERVAL, EvalDisplay, NullEvalDisplay, choose_display
from ramify.evals.engine_process import EngineProcess
from ramify.evals.eval_input import EvalInput, flatten_row, read_config
from ramify.evals.group_scoring import score_pending_groups
from ramify.evals.loading import load_plan
from ramify.evals.plan import PlannedRollout, find_missing
from ramify.evals.policy import check_server, fetch_served_model, open_policy
from ramify.evals.progress import EvalProgress, group_rewards_by_task
from ramify.evals.rollout_runner import RolloutRunner, open_rollout_runner
from ramify.evals.stats import Estimate, clustered_mean
from ramify.evals.summary import build_row
from ramify.evals.watchdog import Watchdog
from ramify.interactive import AwaitableResult, is_interactive, run_coroutine
from ramify.rollout import Environment
from ramify.store import RolloutRecord, RunStore, default_run_name, open_run, wrap_storage_errors
from ramify.store.environments import (
    ObservedEnvironment,
    check_no_changes,
    find_changes,
    format_changes,
    record_environments,
)
from ramify.store.index import DATABASE_NAME, check_index_file
from ramify.store.run_directory import check_identity
from ramify.trace import Trace

IMPORT_TIMEOUT = 120.0  # seconds to import the code of an environment; a worker has as many to boot
SOURCE_NAME = ""  # what the rows of an eval call their only source
WORK_DIR = "work"  # where the work directories that are kept lie in the run


@dataclass(frozen=True, slots=True)
class EvalResult(AwaitableResult):
    """What an eval found: one row for each (task, repetition) that was asked for and has run."""

    path: Path
    rows: Sequence[RolloutRecord]
    num_run: int
    """How many of them ran now; 0 if all were there."""

    @property
    def reward(self) -> Estimate | None:
        """The mean reward, clustered by task; None if no rollout has one."""
        return clustered_mean(group_rewards_by_task(self.rows).values(), *reward_bounds(self.rows))

    def table(self) -> list[dict[str, Any]]:
        """Return one plain dict for each rollout, as `pandas.DataFrame` takes them."""
        return [flatten_row(row) for row in self.rows]

    @property
    def all_failed(self) -> bool:
        """Whether not a single rollout counts."""
        return all(row.failure is not None for row in self.rows)


def evaluate(
    config: EvalInput,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    keep: bool = False,
    display: EvalDisplay | None = None,
    watchdog: Watchdog | None = None,
    **settings: Any,
) -> EvalResult:
    """Run an eval, or the rest of it, and return its result. `fresh` begins anew, `keep` leaves work directories.

    `config` is a configuration, a table of settings, or a taskset: its class, an instance, or its id. `settings` are
    further keys of the table. The call blocks until the eval ends, also inside a running event loop (in a notebook);
    its result may be awaited. An environment that has changed since the run was started raises EnvironmentChanged,
    unless `accept_changes`. A `watchdog` may end the process, so only commands should pass one.
    """
    checked = read_config(config, settings)
    fetch_served_model(checked)  # before the loop: a download blocks, and Ctrl-C should end it
    options = {"fresh": fresh, "accept_changes": accept_changes, "keep": keep}
    shown = display or (choose_display() if is_interactive() else NullEvalDisplay())

    async def watched() -> EvalResult:
        with watchdog.watch() if watchdog is not None else contextlib.nullcontext():
            return await evaluate_async(checked, **options, display=shown, watchdog=watchdog)

    return run_coroutine(watched())


async def evaluate_async(
    config: EvalConfig,
    *,
    fresh: bool,
    accept_changes: bool,
    keep: bool,
    display: EvalDisplay,
    watchdog: Watchdog | None = None,
) -> EvalResult:
    """The same, inside a loop."""
    config = with_eval_split(config)
    path = get_run_path(config)
    with watchdog.extend_timeout(IMPORT_TIMEOUT) if watchdog is not None else contextlib.nullcontext():
        environment = Environment.load(
            config.source_with_workdirs_in(path / WORK_DIR) if keep else config.source, keep_sandboxes=keep
        )
    rollouts = await load_plan(environment, config)
    check_server(config)
    if not environment.has_rewards:
        display.print_line(
            f"warning: {environment.name} has no reward, so its rollouts get no score; {MISSING_REWARD_ADVICE}"
        )
    with open_run(path, config.identity, fresh=fresh, accept_changes=accept_changes) as store:
        revision = _check_environment(
            store, _observe_environment(environment, rollouts, config), display, accept=accept_changes
        )
        with wrap_storage_errors(path):
            write_toml(config, path / "config.toml")
            if keep:
                (path / WORK_DIR).mkdir(exist_ok=True)
        rows = {row.id: row for row in store.rollouts(source=SOURCE_NAME)}
        missing_rollouts = find_missing(rollouts, rows)
        finished_rows = {
            pair.id: rows[pair.id] for pair in rollouts if pair.id in rows and rows[pair.id].failure is None
        }
        progress = EvalProgress(environment.name, len(rollouts), finished_rows)
        try:
            if missing_rollouts:
                async with (
                    open_policy(config, path, display.print_line) as served,
                    open_rollout_runner(config, environment, served, path) as run_rollout,
                ):
                    runner = EvalRunner(config, environment, store, run_rollout, progress, display, revision)
                    async with _cancel_when_engine_exits(served.engine), _refresh_display(progress, display):
                        await runner.run_all(missing_rollouts)
            await score_pending_groups(environment, store, rollouts, progress.rows)
        finally:
            await environment.close()
        return EvalResult(
            path, [progress.rows[pair.id] for pair in rollouts if pair.id in progress.rows], len(missing_rollouts)
        )


@dataclass(slots=True)
class EvalRunner:
    """Runs the pairs that are missing, so many at a time, and keeps each as soon as it is done."""

    config: EvalConfig
    environment: Environment
    store: RunStore
    run_rollout: RolloutRunner
    progress: EvalProgress
    display: EvalDisplay
    revision: int
    """Of the environment."""

    async def run_all(self, rollouts: Sequence[PlannedRollout]) -> None:
        """Run them all; the first failure that is not a rollout's own ends them and is raised."""
        waiting = iter(rollouts)
        self.progress.start_clock()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self.config.concurrency, len(rollouts))):
                    group.create_task(self._run_from_queue(waiting), name=f"rollouts {number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_from_queue(self, waiting: Iterator[PlannedRollout]) -> None:
        for rollout in waiting:
            self.progress.start_rollout(rollout.id)
            traces = await self._run_one(rollout)
            row = build_row(self.environment, rollout.task_key, rollout.repetition, traces, self.revision)
            await self.store.add_rollout(row, traces)
            self.progress.finish_rollout(row)
            self.display.on_rollout_finished(row, self.progress)

    async def _run_one(self, rollout: PlannedRollout) -> Sequence[Trace]:
        def on_progress(phase: str, trace: Trace) -> None:
            self.progress.update_rollout(rollout.id, phase, len(trace.sampled_nodes))

        return await self.run_rollout(rollout, on_progress)


def find_rollouts_to_run(
    config: EvalConfig,
    environment: Environment,
    rollouts: Sequence[PlannedRollout],
    *,
    fresh: bool,
    accept_changes: bool,
) -> list[PlannedRollout]:
    """Return the pairs that an eval would run. Raises what the eval would raise when it opens its run."""
    path = get_run_path(config)
    if fresh:
        return list(rollouts)
    check_index_file(path)
    if not (path / DATABASE_NAME).is_file():
        return list(rollouts)
    with RunStore.open(path, write=False) as store:
        check_identity(store, config.identity, accept_changes)
        if not accept_changes:
            check_no_changes(
                store, find_changes(store, {SOURCE_NAME: _observe_environment(environment, rollouts, config)})
            )
        return find_missing(rollouts, {row.id: row for row in store.rollouts(source=SOURCE_NAME)})


def _observe_environment(
    environment: Environment, rollouts: Sequence[PlannedRollout], config: EvalConfig
) -> ObservedEnvironment:
    tasks = [pair.task for pair in rollouts if pair.repetition == 0]
    return ObservedEnvironment(
        environment.identity,
        {number: task.content_digest for number, task in enumerate(tasks)},
        {number: task.identity for number, task in enumerate(tasks)},
        num_tasks=len(tasks) if len(tasks) < config.num_tasks else None,
    )


def _check_environment(store: RunStore, observed: ObservedEnvironment, display: EvalDisplay, *, accept: bool) -> int:
    """Return the revision of the environment; raise EnvironmentChanged where it is a new one that nobody accepted."""
    changes = find_changes(store, {SOURCE_NAME: observed})
    if not accept:
        check_no_changes(store, changes)
    revision = record_environments(store, {SOURCE_NAME: observed}, changes)[SOURCE_NAME]
    if changes:
        lines = "".join(f"\n  {line}" for line in format_changes(changes))
        display.print_line(f"the environment is now revision {revision}; the change is recorded:{lines}")
    return revision


def with_eval_split(config: EvalConfig) -> EvalConfig:
    """The configuration with the `eval` split, unless it says which."""
    return config.model_copy(update={"taskset": {"split": "eval", **config.taskset}})


def get_run_path(config: EvalConfig) -> Path:
    """The run's directory."""
    name = config.name or default_run_name(str(config.taskset.get("id", "")), config.model.name, config.identity)
    return config.output / name


@contextlib.asynccontextmanager
async def _refresh_display(progress: EvalProgress, display: EvalDisplay) -> AsyncIterator[None]:
    async def refresh_loop() -> None:
        while True:
            display.refresh(progress)
            await asyncio.sleep(REFRESH_INTERVAL)

    with display:
        refresh_task = asyncio.create_task(refresh_loop(), name="display")
        try:
            yield
        finally:
            refresh_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refresh_task


@contextlib.asynccontextmanager
async def _cancel_when_engine_exits(engine: EngineProcess | None) -> AsyncIterator[None]:
    """Give up as soon as the server that was started for this eval is gone: no rollout can succeed any more."""
    current_task = asyncio.current_task()
    assert current_task is not None
    engine_exited = False

    async def wait_for_exit(server: EngineProcess) -> None:
        nonlocal engine_exited
        while server.is_alive():
            await asyncio.sleep(REFRESH_INTERVAL)
        engine_exited = True
        current_task.cancel()

    if engine is None:
        yield
        return
    watch_task = asyncio.create_task(wait_for_exit(engine), name="engine")
    try:
        yield
    except asyncio.CancelledError:
        if not engine_exited:
            raise
        current_task.uncancel()
        raise ProviderError(f"the model server is gone; the end of {engine.log_path}:\n{engine.log_tail()}") from None
    finally:
        watch_task.cancel()
