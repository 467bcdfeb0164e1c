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
from ramify.evals.display import EVERY, Display, Quiet, choose
from ramify.evals.engine import EngineChild
from ramify.evals.groups import score_groups
from ramify.evals.loading import load_pairs
from ramify.evals.plan import Pair, missing
from ramify.evals.policies import answering, check_server, fetch_served_model
from ramify.evals.progress import Progress, by_task
from ramify.evals.running import Runs, running
from ramify.evals.settings import EvalInput, flatten_row, read_config
from ramify.evals.stats import Estimate, clustered_mean
from ramify.evals.summary import row_of
from ramify.evals.watchdog import Watchdog
from ramify.interactive import AwaitableResult, is_watched, run_coroutine
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
SOURCE = ""  # what the rows of an eval call their only source
WORK = "work"  # where the work directories that are kept lie in the run


@dataclass(frozen=True, slots=True)
class Result(AwaitableResult):
    """What an eval found: one row for each (task, repetition) that was asked for and has run."""

    path: Path
    rows: Sequence[RolloutRecord]
    ran: int
    """How many of them ran now; 0 if all were there."""

    @property
    def reward(self) -> Estimate | None:
        """The mean reward, clustered by task; None if no rollout has one."""
        return clustered_mean(by_task(self.rows).values(), *reward_bounds(self.rows))

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
    display: Display | None = None,
    watchdog: Watchdog | None = None,
    **settings: Any,
) -> Result:
    """Run an eval, or the rest of it, and return its result. `fresh` begins anew, `keep` leaves work directories.

    `config` is a configuration, a table of settings, or a taskset: its class, an instance, or its id. `settings` are
    further keys of the table. The call blocks until the eval ends, also inside a running event loop (in a notebook);
    its result may be awaited. An environment that has changed since the run was started raises EnvironmentChanged,
    unless `accept_changes`. A `watchdog` may end the process, so only commands should pass one.
    """
    checked = read_config(config, settings)
    fetch_served_model(checked)  # before the loop: a download blocks, and Ctrl-C should end it
    options = {"fresh": fresh, "accept_changes": accept_changes, "keep": keep}
    shown = display or (choose() if is_watched() else Quiet())

    async def watched() -> Result:
        with watchdog.watching() if watchdog is not None else contextlib.nullcontext():
            return await evaluation(checked, **options, display=shown, watchdog=watchdog)

    return run_coroutine(watched())


async def evaluation(
    config: EvalConfig,
    *,
    fresh: bool,
    accept_changes: bool,
    keep: bool,
    display: Display,
    watchdog: Watchdog | None = None,
) -> Result:
    """The same, inside a loop."""
    config = with_split(config)
    path = run_path(config)
    with watchdog.allowing(IMPORT_TIMEOUT) if watchdog is not None else contextlib.nullcontext():
        environment = Environment.load(config.kept_in(path / WORK) if keep else config.source, keep_sandboxes=keep)
    pairs = await load_pairs(environment, config)
    check_server(config)
    if not environment.has_rewards:
        display.say(f"warning: {environment.name} has no reward, so its rollouts get no score; {MISSING_REWARD_ADVICE}")
    with open_run(path, config.identity, fresh=fresh, accept_changes=accept_changes) as store:
        revision = _check_environment(store, _observe(environment, pairs, config), display, accept=accept_changes)
        with wrap_storage_errors(path):
            write_toml(config, path / "config.toml")
            if keep:
                (path / WORK).mkdir(exist_ok=True)
        rows = {row.id: row for row in store.rollouts(source=SOURCE)}
        todo = missing(pairs, rows)
        known = {pair.id: rows[pair.id] for pair in pairs if pair.id in rows and rows[pair.id].failure is None}
        progress = Progress(environment.name, len(pairs), known)
        try:
            if todo:
                async with (
                    answering(config, path, display.say) as found,
                    running(config, environment, found, path) as runs,
                ):
                    filling = Filling(config, environment, store, runs, progress, display, revision)
                    async with _watched(found.engine), _shown(progress, display):
                        await filling.fill(todo)
            await score_groups(environment, store, pairs, progress.rows)
        finally:
            await environment.close()
        return Result(path, [progress.rows[pair.id] for pair in pairs if pair.id in progress.rows], len(todo))


@dataclass(slots=True)
class Filling:
    """Runs the pairs that are missing, so many at a time, and keeps each as soon as it is done."""

    config: EvalConfig
    environment: Environment
    store: RunStore
    runs: Runs
    progress: Progress
    display: Display
    revision: int
    """Of the environment."""

    async def fill(self, pairs: Sequence[Pair]) -> None:
        """Run them all; the first failure that is not a rollout's own ends them and is raised."""
        waiting = iter(pairs)
        self.progress.start()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self.config.concurrency, len(pairs))):
                    group.create_task(self._work(waiting), name=f"rollouts {number}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, waiting: Iterator[Pair]) -> None:
        for pair in waiting:
            self.progress.begin(pair.id)
            traces = await self._run(pair)
            row = row_of(self.environment, pair.key, pair.repetition, traces, self.revision)
            await self.store.add_rollout(row, traces)
            self.progress.end(row)
            self.display.ended(row, self.progress)

    async def _run(self, pair: Pair) -> Sequence[Trace]:
        def watch(phase: str, trace: Trace) -> None:
            self.progress.watch(pair.id, phase, len(trace.sampled_nodes))

        return await self.runs(pair, watch)


def plan_rollouts(
    config: EvalConfig, environment: Environment, pairs: Sequence[Pair], *, fresh: bool, accept_changes: bool
) -> list[Pair]:
    """Return the pairs that an eval would run. Raises what the eval would raise when it opens its run."""
    path = run_path(config)
    if fresh:
        return list(pairs)
    check_index_file(path)
    if not (path / DATABASE_NAME).is_file():
        return list(pairs)
    with RunStore.open(path, write=False) as store:
        check_identity(store, config.identity, accept_changes)
        if not accept_changes:
            check_no_changes(store, find_changes(store, {SOURCE: _observe(environment, pairs, config)}))
        return missing(pairs, {row.id: row for row in store.rollouts(source=SOURCE)})


def _observe(environment: Environment, pairs: Sequence[Pair], config: EvalConfig) -> ObservedEnvironment:
    tasks = [pair.task for pair in pairs if pair.repetition == 0]
    return ObservedEnvironment(
        environment.identity,
        {number: task.content_digest for number, task in enumerate(tasks)},
        {number: task.identity for number, task in enumerate(tasks)},
        num_tasks=len(tasks) if len(tasks) < config.num_tasks else None,
    )


def _check_environment(store: RunStore, observed: ObservedEnvironment, display: Display, *, accept: bool) -> int:
    """Return the revision of the environment; raise EnvironmentChanged where it is a new one that nobody accepted."""
    changes = find_changes(store, {SOURCE: observed})
    if not accept:
        check_no_changes(store, changes)
    revision = record_environments(store, {SOURCE: observed}, changes)[SOURCE]
    if changes:
        lines = "".join(f"\n  {line}" for line in format_changes(changes))
        display.say(f"the environment is now revision {revision}; the change is recorded:{lines}")
    return revision


def with_split(config: EvalConfig) -> EvalConfig:
    """The configuration with the `eval` split, unless it says which."""
    return config.model_copy(update={"taskset": {"split": "eval", **config.taskset}})


def run_path(config: EvalConfig) -> Path:
    """The run's directory."""
    name = config.name or default_run_name(str(config.taskset.get("id", "")), config.model.name, config.identity)
    return config.output / name


@contextlib.asynccontextmanager
async def _shown(progress: Progress, display: Display) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            display.look(progress)
            await asyncio.sleep(EVERY)

    with display:
        looking = asyncio.create_task(look(), name="display")
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


@contextlib.asynccontextmanager
async def _watched(engine: EngineChild | None) -> AsyncIterator[None]:
    """Give up as soon as the server that was started for this eval is gone: no rollout can succeed any more."""
    this = asyncio.current_task()
    assert this is not None
    lost = False

    async def watch(server: EngineChild) -> None:
        nonlocal lost
        while server.alive():
            await asyncio.sleep(EVERY)
        lost = True
        this.cancel()

    if engine is None:
        yield
        return
    watching = asyncio.create_task(watch(engine), name="engine")
    try:
        yield
    except asyncio.CancelledError:
        if not lost:
            raise
        this.uncancel()
        raise ProviderError(f"the model server is gone; the end of {engine.log}:\n{engine.tail()}") from None
    finally:
        watching.cancel()
