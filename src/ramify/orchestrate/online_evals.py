"""Evals during a training run, on tasks that are not trained on.

An eval that holds the weights is recorded at the step of the version it held; any other, at the step it was started
for. A rollout that failed because of the system counts as missing, not as zero.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ramify.core.errors import EnvironmentChanged, Failure, RamifyError, WeightsReplaced
from ramify.core.seeds import derive_seed
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.group_tracker import find_attempt_failure, list_system_failures
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.rollout.evals.stats import (
    choose_ks,
    clustered_mean,
    estimate_pass_rates,
    format_score,
    mean_by_name,
    safe_mean,
)
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.run_log import MetricPoint
from ramify.run.store.summary import REVISION_KEY, summarize_rollout
from ramify.trace import Trace

MAX_CONCURRENT_ROLLOUTS = 64  # per eval


class EvalSchedule:
    """When the `[[eval]]` sources of a run are due: before the first step, every `interval` steps, and at the end."""

    def __init__(self, sources: Iterable[EvalSourceConfig]) -> None:
        self._intervals = {source.source_name: source.interval for source in sources}
        self._last_evaluated_step: dict[str, int] = {}  # by source

    def restore(self, metrics: Iterable[MetricPoint]) -> None:
        """Skip the evals of an earlier process, given its recorded metrics `eval/SOURCE/avg`."""
        for metric in metrics:
            source = metric.name.removeprefix("eval/").removesuffix("/avg")  # it may contain a slash
            self._last_evaluated_step[source] = metric.step

    def get_due_sources(self, step: int, *, is_last: bool = False) -> list[str]:
        """Return the sources to evaluate at a step: all at the first and the last, others once per interval."""
        return [name for name, interval in self._intervals.items() if self._is_due(name, interval, step, is_last)]

    def _is_due(self, name: str, interval: int | None, step: int, is_last: bool) -> bool:
        before = self._last_evaluated_step.get(name)
        if before is None or (is_last and step > before):
            return True
        return interval is not None and step // interval > before // interval

    def mark_started(self, step: int, names: Iterable[str]) -> None:
        """Note that the sources `names` are evaluated at a step."""
        self._last_evaluated_step |= dict.fromkeys(names, step)


class OnlineEvaluator:
    """Evaluates the `[[eval]]` sources of a run. Without a `weight_updater`, the weights do not change meanwhile.

    `on_result` gets step and metrics of each finished eval, `on_failure` the name of a source and a failure;
    `on_progress` is called after every rollout. `started_at` holds the monotonic start time of each running eval.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[EvalSourceConfig, ConnectedSource]],
        weight_updater: WeightUpdater | None,
        store: RunStore,
        *,
        seed: int,
        on_result: Callable[[int, dict[str, float]], None],
        on_failure: Callable[[str, Failure], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._sources, self._weight_updater, self._store, self._seed = sources, weight_updater, store, seed
        self._on_result, self._on_failure, self._on_progress = on_result, on_failure, on_progress
        self.started_at: dict[str, float] = {}
        self._queue: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()  # step and sources of due evals
        self.schedule = EvalSchedule(config for config, _ in sources.values())

    def get_due_sources(self, step: int, *, is_last: bool = False) -> list[str]:
        """Return the sources that are due at a step."""
        return self.schedule.get_due_sources(step, is_last=is_last)

    async def run(self, step: int, names: list[str]) -> None:
        """Evaluate the sources `names` at a step."""
        self.schedule.mark_started(step, names)
        async with asyncio.TaskGroup() as task_group:
            for name in names:
                task_group.create_task(self._evaluate_source(name, step), name=f"eval {name} at {step}")

    async def _evaluate_source(self, name: str, step: int) -> None:
        config, source = self._sources[name]
        uses_run_engines = config.endpoint is None
        updater = self._weight_updater
        if not (uses_run_engines if config.hold_weights is None else config.hold_weights):
            updater = None
        self.started_at[name] = started_at = time.monotonic()
        try:
            async with contextlib.nullcontext() if updater is None else updater.hold():
                held_version = None if updater is None else updater.served_version
                if held_version is not None:
                    step = held_version.step  # it may be newer than the eval
                traces_by_task = await self._run_rollouts(name, config, source, step)
                if updater is not None and held_version not in (None, version := updater.served_version):
                    problem = f"the engines lost {held_version}, so that some rollouts of this eval used {version}"
                    self._on_failure(f"eval/{name}", Failure.from_exception(WeightsReplaced(problem)))
        finally:
            del self.started_at[name]
        metrics = _compute_metrics(f"eval/{name}", config, traces_by_task)
        self._on_result(step, {**metrics, f"eval/{name}/seconds": time.monotonic() - started_at})

    def queue_due_sources(self, step: int) -> None:
        """Queue the evals that are due at a step."""
        if names := self.get_due_sources(step):
            self._queue.put_nowait((step, names))

    async def wait_for_queued(self) -> None:
        """Wait until all queued evals have ended."""
        await self._queue.join()

    async def run_queued(self) -> None:
        """Run the queued evals until it is cancelled; those that became due during the last one are run as one."""
        while True:
            step, names = await self._queue.get()
            while not self._queue.empty():
                self._queue.task_done()
                step, more_names = self._queue.get_nowait()
                names = [*names, *more_names]
            due = self.get_due_sources(step)
            if names := [name for name in dict.fromkeys(names) if name in due]:
                await self.run(step, names)
            self._queue.task_done()

    async def _run_rollouts(
        self, name: str, config: EvalSourceConfig, source: ConnectedSource, step: int
    ) -> list[list[Trace]]:
        """Run and store the rollouts of an eval, and return the traces that count, for each task."""
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_ROLLOUTS)
        num_tasks = config.num_tasks if source.num_tasks is None else min(source.num_tasks, config.num_tasks)

        async def run_rollout(number: int, repetition: int) -> list[Trace]:
            rollout_id = f"eval.{name}.{step}.{number}.{repetition}"
            async with semaphore:
                traces = await self._run_with_retries(source, number, rollout_id, repetition, f"{name}:{number}")
            self._on_progress()
            return traces

        async def run_task(number: int) -> list[Trace]:
            async with asyncio.TaskGroup() as task_group:
                rollouts = [task_group.create_task(run_rollout(number, i)) for i in range(config.repetitions)]
            episodes = {i: rollout.result() for i, rollout in enumerate(rollouts) if rollout.result()}
            valid_traces = [traces[0] for traces in episodes.values() if not list_system_failures(traces)]
            if source.group_rewards and valid_traces:
                with contextlib.suppress(RamifyError):  # it is reported, and a missing reward counts as missing
                    await source.add_group_rewards(
                        valid_traces, lambda failure: self._on_failure(f"eval/{name}", failure)
                    )
            for repetition, traces in episodes.items():
                record = _build_record(name, step, number, repetition, traces, source.revision)
                await self._store.add_rollout(record, traces)
            return [trace for trace in valid_traces if None not in trace.rewards.values()]

        async with asyncio.TaskGroup() as task_group:
            tasks = [task_group.create_task(run_task(number)) for number in range(num_tasks)]
        return [task.result() for task in tasks]

    async def _run_with_retries(
        self, source: ConnectedSource, task_number: int, rollout_id: str, repetition: int, seed: str
    ) -> list[Trace]:
        """Run one rollout, in at most `max_tries` tries; return the traces of the last try that ended with traces."""
        traces: list[Trace] = []
        for num_tries_left in reversed(range(source.max_tries)):
            try:
                task = await source.tasks.get_task(task_number)
                result = await source.servers.run(
                    task,
                    id=rollout_id,
                    group=rollout_id,
                    attempt=repetition,
                    seed=derive_seed(f"{self._seed}:{seed}"),
                    environment_digest=source.environment_digest,
                    timeout=source.get_attempt_timeout(task),
                )
                traces = list(result.episode.traces)
                failure = find_attempt_failure(traces, source.group_rewards)
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                failure = Failure.from_exception(error)
            if failure is None:
                break
            self._on_failure(f"eval/{source.name}", failure)
            if not failure.retryable or not num_tries_left:
                break
            await source.wait_before_retry(failure)
        return traces


def format_eval_result(step: int, values: Mapping[str, float]) -> str:
    """Return a line with the scores of an eval, and with the rollouts that are missing."""
    fields = [f"{name} {format_score(value)}" for name, value in values.items() if name.endswith(("/avg", "/exact"))]
    fields += [f"{name} {value:g}" for name, value in values.items() if name.endswith("/missing") and value]
    return f"eval at step {step}: {', '.join(fields)}"


def _build_record(
    name: str, step: int, task_number: int, repetition: int, traces: Sequence[Trace], revision: int
) -> RolloutRecord:
    failure = next(iter(list_system_failures(traces)), None)
    return RolloutRecord(
        traces[0].episode,
        str(task_number),
        repetition,
        f"eval/{name}",
        traces[0].reward,
        None if failure is None else failure.name,
        {**summarize_rollout(traces, failure), "step": step, REVISION_KEY: revision},
    )


def _compute_metrics(prefix: str, config: EvalSourceConfig, traces_by_task: list[list[Trace]]) -> dict[str, float]:
    rewards = [[trace.reward for trace in traces if trace.reward is not None] for traces in traces_by_task]
    num_missing = sum(len(traces) < config.repetitions for traces in traces_by_task)
    metrics = {f"{prefix}/missing": float(num_missing)}
    if not any(traces_by_task):
        return metrics
    if (mean := clustered_mean(rewards)) is not None:
        metrics[f"{prefix}/avg"] = mean.mean
        if mean.stderr is not None:
            metrics[f"{prefix}/error"] = mean.stderr
    for k in choose_ks(config.repetitions):
        if (pass_rates := estimate_pass_rates(rewards, k, config.pass_threshold)) is not None:
            metrics[f"{prefix}/pass@{k}"], metrics[f"{prefix}/pass^{k}"] = pass_rates[0].mean, pass_rates[1].mean
    all_traces = [trace for traces in traces_by_task for trace in traces]
    means = mean_by_name(trace.metrics for trace in all_traces)
    metrics |= {f"{prefix}/metric/{name}": value for name, value in means.items()}
    metrics[f"{prefix}/truncated"] = safe_mean([trace.is_truncated for trace in all_traces])
    return metrics
