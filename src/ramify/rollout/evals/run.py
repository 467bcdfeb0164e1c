"""The run of an eval: open the run directory, find the missing rollouts, run them, and return the result."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ramify.core.async_calls import unwrap_exception_group
from ramify.core.config import (
    CONFIG_FILE,
    expand_model_name,
    get_explicit_values,
    parse_section,
    read_stored_config,
    write_toml,
)
from ramify.core.display import choose_api_display, open_display
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.core.hub import Log, print_to_stderr
from ramify.core.interactive import AwaitableResult, run_coroutine
from ramify.env import Task, Taskset
from ramify.env.data_selection import find_dataset, pin_taskset
from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.env.judges.cache import set_cache_directory
from ramify.env.taskset_id import build_taskset_table
from ramify.infer.config import expand_run_models
from ramify.rollout import Environment, score_group
from ramify.rollout.evals.blocked_loop import LoopWatchdog
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.evals.plan import PlannedRollout, compute_task_digest, find_missing, load_plan
from ramify.rollout.evals.policy_client import (
    EngineProcess,
    check_server,
    check_task_images,
    fetch_served_model,
    open_policy,
)
from ramify.rollout.evals.progress import (
    REFRESH_INTERVAL,
    EvalContent,
    EvalDisplay,
    EvalProgress,
    group_rewards_by_task,
)
from ramify.rollout.evals.rollout_runner import RolloutRunner, open_rollout_runner
from ramify.rollout.evals.rows import build_row, flatten_row
from ramify.rollout.evals.stats import Estimate, clustered_mean, reward_bounds
from ramify.run.lookup import default_run_name
from ramify.run.store import RolloutRecord, RunStore, open_run, storage_call
from ramify.run.store.environments import (
    ObservedEnvironment,
    check_no_changes,
    find_changes,
    format_changes,
    record_environments,
)
from ramify.run.store.index import DATABASE_NAME, check_index_file
from ramify.run.store.run_directory import check_identity
from ramify.run.store.summary import REVISION_KEY
from ramify.trace import Trace

EvalInput = EvalConfig | Mapping[str, Any] | Taskset | type[Taskset] | str
IMPORT_TIMEOUT = 120.0  # seconds to import the environment's code; the boot timeout of a worker is the same
SOURCE_NAME = ""  # source of all rows of an eval
WORK_DIR = "work"  # directory of kept work directories, below the run directory


async def score_pending_groups(
    environment: Environment,
    store: RunStore,
    rollouts: Sequence[PlannedRollout],
    rows: MutableMapping[str, RolloutRecord],
    *,
    concurrency: int,
) -> None:
    """Score every group that has a rollout without a reward, and replace its rows in `rows` and in the store.

    A group is all valid traces of a task, including traces of earlier starts; one that has grown is scored again.
    At most `concurrency` groups are scored at a time.
    """
    slots = asyncio.Semaphore(concurrency)

    async def score(group: Sequence[PlannedRollout]) -> None:
        async with slots:
            episodes = [store.read_traces(rollout.id) for rollout in group]
            await _score_with_retries(environment, group[0].task, [traces[0] for traces in episodes])
            for rollout, traces in zip(group, episodes, strict=True):
                revision = rows[rollout.id].summary[REVISION_KEY]
                row = build_row(environment, rollout.task_key, rollout.repetition, traces, revision)
                await store.add_rollout(row, traces)
                rows[rollout.id] = row

    if not environment.hooks.group_rewards:
        return
    async with asyncio.TaskGroup() as task_group:
        for _, group in groupby(rollouts, key=lambda rollout: rollout.task_key):
            valid = [rollout for rollout in group if (row := rows.get(rollout.id)) is not None and row.failure is None]
            if any(rows[rollout.id].reward is None for rollout in valid):
                task_group.create_task(score(valid), name=f"score {valid[0].task_key}")


async def _score_with_retries(environment: Environment, task: Task, traces: Sequence[Trace]) -> None:
    """Score a group, in at most `max_tries` tries; the failures of the last try stay in the traces."""
    num_errors = [len(trace.errors) for trace in traces]
    for num_tries_left in reversed(range(environment.source.max_tries)):
        await score_group(environment, task, traces)
        failures = [failure for trace, count in zip(traces, num_errors) for failure in trace.errors[count:]]
        if not num_tries_left or not any(failure.retryable for failure in failures):
            return
        for trace, count in zip(traces, num_errors, strict=True):
            del trace.errors[count:]


def read_config(config_input: EvalInput, settings: Mapping[str, Any]) -> EvalConfig:
    """Return the configuration given by `config_input`, with the keys of `settings` set in it."""
    if isinstance(config_input, EvalConfig):
        if not settings:
            return config_input
        config_input = get_explicit_values(config_input)
    table = expand_model_name(
        {**(config_input if isinstance(config_input, Mapping) else {"taskset": config_input}), **settings}
    )
    if "taskset" in table:
        table["taskset"] = build_taskset_table(table["taskset"], Path(table.get("output", "outputs")))
    return parse_section(EvalConfig, table, key="eval")


@dataclass(frozen=True, slots=True)
class EvalResult(AwaitableResult):
    """The result of an eval: the run directory, and one row for each planned rollout that has run."""

    path: Path
    rows: Sequence[RolloutRecord]
    num_run: int  # number of rollouts that ran in this call; 0 if the eval was finished before

    @property
    def reward(self) -> Estimate | None:
        """The mean reward, clustered by task; None if no rollout has one."""
        return clustered_mean(group_rewards_by_task(self.rows).values(), *reward_bounds(self.rows))

    def table(self) -> list[dict[str, Any]]:
        """Return one dict of plain values for each rollout, for example for `pandas.DataFrame`."""
        return [flatten_row(row) for row in self.rows]

    @property
    def all_failed(self) -> bool:
        """Whether every rollout had a system failure."""
        return all(row.failure is not None for row in self.rows)


def evaluate(
    config: EvalInput,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    keep_workdirs: bool = False,
    display: EvalDisplay | None = None,
    watchdog: LoopWatchdog | None = None,
    **settings: Any,
) -> EvalResult:
    """Run an eval, or the missing part of it, and return its result.

    `config` is a configuration, a table of settings, or a taskset: its class, an instance, or its id. `settings` are
    further keys of the table. The call blocks until the eval ends, also inside a running event loop (in a notebook);
    its result may be awaited. With `fresh` the eval starts over; with `keep_workdirs` work directories are not deleted.
    Raises EnvironmentChanged if the environment has changed since the run was started, unless `accept_changes` is set.
    `display` shows the progress. A `watchdog` may end the process, so only commands should pass one.
    """
    eval_config = expand_run_models(read_config(config, settings))
    fetch_served_model(eval_config)  # outside the event loop: a download blocks, and Ctrl-C must interrupt it
    eval_config = pin_eval_dataset(eval_config, fresh=fresh, accept_changes=accept_changes, log=print_to_stderr)
    if display is None:
        display = choose_api_display(EvalContent())

    async def run(display: EvalDisplay) -> EvalResult:
        with watchdog.watch() if watchdog is not None else contextlib.nullcontext():
            return await evaluate_async(
                eval_config,
                fresh=fresh,
                accept_changes=accept_changes,
                keep_workdirs=keep_workdirs,
                display=display,
                watchdog=watchdog,
            )

    return run_coroutine(run(display))


async def evaluate_async(
    config: EvalConfig,
    *,
    fresh: bool,
    accept_changes: bool,
    keep_workdirs: bool,
    display: EvalDisplay,
    watchdog: LoopWatchdog | None = None,
) -> EvalResult:
    """Run an eval as `evaluate` does, in the running event loop."""
    config = with_eval_split(config)
    path = get_run_path(config)
    set_cache_directory(path)
    with watchdog.extend_timeout(IMPORT_TIMEOUT) if watchdog is not None else contextlib.nullcontext():
        source = config.source_with_kept_workdirs(path / WORK_DIR) if keep_workdirs else config.source
        environment = Environment.load(source)
    rollouts = await load_plan(environment, config)
    check_server(config, environment)
    is_new = fresh or not path.exists()
    if is_new:  # before its directory is created
        await _check_images_of_first_new_task(config, environment, rollouts, {})
    if not environment.has_rewards:
        display.print_line(
            f"warning: {environment.name} has no reward, so its rollouts get no score; {MISSING_REWARD_ADVICE}"
        )
    with open_run(path, config.identity, fresh=fresh, accept_changes=accept_changes) as store:
        rows = {row.id: row for row in store.rollouts(source=SOURCE_NAME)}
        if not is_new:
            await _check_images_of_first_new_task(config, environment, rollouts, rows)
        observed = await _observe_environment(environment, rollouts, config)
        revision = _check_environment(store, observed, display, accept=accept_changes)
        with storage_call(path):
            write_toml(config, path / CONFIG_FILE)
            if keep_workdirs:
                (path / WORK_DIR).mkdir(exist_ok=True)
        missing_rollouts = find_missing(rollouts, rows)
        missing_ids = {rollout.id for rollout in missing_rollouts}
        finished_rows = {rollout.id: rows[rollout.id] for rollout in rollouts if rollout.id not in missing_ids}
        progress = EvalProgress(environment.name, len(rollouts), finished_rows)

        async def get_progress() -> EvalProgress:
            return progress

        try:
            if missing_rollouts:
                async with (
                    open_policy(config, path, display.print_line) as served,
                    open_rollout_runner(config, environment, served, path) as run_rollout,
                ):
                    runner = EvalRunner(config, environment, store, run_rollout, progress, display, revision, watchdog)
                    async with (
                        fail_when_engine_exits(served.engine),
                        open_display(display, get_progress, REFRESH_INTERVAL),
                    ):
                        await runner.run_all(missing_rollouts)
            await score_pending_groups(environment, store, rollouts, progress.rows, concurrency=config.concurrency)
        finally:
            await environment.close()
        return EvalResult(path, [progress.rows[rollout.id] for rollout in rollouts], len(missing_rollouts))


@dataclass(slots=True)
class EvalRunner:
    """Runs rollouts, `config.concurrency` at a time, and stores each as soon as it is finished.

    `revision` is the revision of the environment.
    """

    config: EvalConfig
    environment: Environment
    store: RunStore
    run_rollout: RolloutRunner
    progress: EvalProgress
    display: EvalDisplay
    revision: int
    watchdog: LoopWatchdog | None = None

    async def run_all(self, rollouts: Sequence[PlannedRollout]) -> None:
        """Run all rollouts. An exception outside a rollout cancels the others and is raised."""
        queue = iter(rollouts)
        self.progress.start_clock()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self.config.concurrency, len(rollouts))):
                    group.create_task(self._run_from_queue(queue), name=f"rollouts {number}")
        except BaseExceptionGroup as failures:
            raise unwrap_exception_group(failures) from None
        finally:
            self.display.refresh(self.progress)  # the last rollouts

    async def _run_from_queue(self, queue: Iterator[PlannedRollout]) -> None:
        for rollout in queue:

            def on_progress(phase: str, num_calls: int, id: str = rollout.id) -> None:
                self.progress.update_rollout(id, phase, num_calls)
                self._note_running()

            self.progress.start_rollout(rollout.id)
            traces = await self.run_rollout(rollout, on_progress)
            row = build_row(self.environment, rollout.task_key, rollout.repetition, traces, self.revision)
            await self.store.add_rollout(row, traces)
            self.progress.finish_rollout(row)
            self._note_running()

    def _note_running(self) -> None:
        if self.watchdog is not None:
            self.watchdog.set_running({id: rollout.phase for id, rollout in self.progress.running.items()})


async def find_rollouts_to_run(
    config: EvalConfig,
    environment: Environment,
    rollouts: Sequence[PlannedRollout],
    *,
    fresh: bool,
    accept_changes: bool,
) -> list[PlannedRollout]:
    """Return the rollouts that an eval would run. Raises what the eval would raise when it opens its run."""
    path = get_run_path(config)
    if not fresh:
        check_index_file(path)
    if fresh or not (path / DATABASE_NAME).is_file():
        await _check_images_of_first_new_task(config, environment, rollouts, {})
        return list(rollouts)
    with RunStore.open(path, write=False) as store:
        check_identity(store, config.identity, accept_changes)
        rows = {row.id: row for row in store.rollouts(source=SOURCE_NAME)}
        await _check_images_of_first_new_task(config, environment, rollouts, rows)
        if not accept_changes:
            observed = await _observe_environment(environment, rollouts, config)
            check_no_changes(store, find_changes(store, {SOURCE_NAME: observed}))
        return find_missing(rollouts, rows)


async def _check_images_of_first_new_task(
    config: EvalConfig,
    environment: Environment,
    rollouts: Sequence[PlannedRollout],
    rows: Mapping[str, RolloutRecord],
) -> None:
    """Check the images of the first task with a rollout that has never run, as `check_task_images` does.

    A rollout that has failed does not count: it is run again, and fails with the reason.
    """
    new_rollout = next((rollout for rollout in rollouts if rollout.id not in rows), None)
    if new_rollout is not None:
        await check_task_images(config, environment, new_rollout.task)


async def _observe_environment(
    environment: Environment, rollouts: Sequence[PlannedRollout], config: EvalConfig
) -> ObservedEnvironment:
    tasks = [rollout.task for rollout in rollouts if rollout.repetition == 0]
    return ObservedEnvironment(
        environment.identity,
        {number: await compute_task_digest(task) for number, task in enumerate(tasks)},
        {number: task.identity for number, task in enumerate(tasks)},
        num_tasks=len(tasks) if len(tasks) < config.num_tasks else None,
    )


def _check_environment(store: RunStore, observed: ObservedEnvironment, display: EvalDisplay, *, accept: bool) -> int:
    """Record the environment and return its revision. Raises EnvironmentChanged if it changed, unless `accept`."""
    changes = find_changes(store, {SOURCE_NAME: observed})
    if not accept:
        check_no_changes(store, changes)
    revision = record_environments(store, {SOURCE_NAME: observed}, changes)[SOURCE_NAME]
    if changes:
        lines = "".join(f"\n  {line}" for line in format_changes(changes))
        display.print_line(f"the environment is now revision {revision}; the change is recorded:{lines}")
    return revision


def with_eval_split(config: EvalConfig) -> EvalConfig:
    """Return the configuration with the `eval` split, unless it sets a split."""
    return config.model_copy(update={"taskset": {"split": "eval", **config.taskset}})


def get_run_path(config: EvalConfig) -> Path:
    """Return the directory of the run."""
    name = config.name or default_run_name(str(config.taskset.get("id", "")), config.model.name, config.identity)
    return config.output / name


def pin_eval_dataset(config: EvalConfig, *, fresh: bool, accept_changes: bool, log: Log | None) -> EvalConfig:
    """Return the configuration with the commit of the dataset that the taskset reads, see `pin_dataset`."""
    if find_dataset(config.taskset) is None:
        return config
    path, previous = get_run_path(with_eval_split(config)), None
    with contextlib.suppress(ConfigInvalid):  # there was no start before
        previous = None if fresh else read_stored_config(EvalConfig, path / CONFIG_FILE).taskset
    taskset = pin_taskset(config.taskset, previous, key="taskset", log=log, accept_changes=accept_changes)
    name = str(path.relative_to(config.output))  # the default name does not depend on the commit
    return config.model_copy(update={"taskset": taskset, "name": name})


@contextlib.asynccontextmanager
async def fail_when_engine_exits(engine: EngineProcess | None) -> AsyncGenerator[None]:
    """Raise ProviderError as soon as the engine that was started for this eval exits; no rollout could succeed then."""

    async def wait_for_exit(server: EngineProcess) -> None:
        await server.wait()
        raise ProviderError(f"the model server exited; {server.log.describe_tail()}")

    if engine is None:
        yield
        return
    try:
        async with asyncio.TaskGroup() as group:
            watch_task = group.create_task(wait_for_exit(engine), name="engine")
            yield
            watch_task.cancel()
    except BaseExceptionGroup as failures:
        failure = unwrap_exception_group(failures)
        raise failure from failure.__cause__
