"""Online evals: how good are the weights of this step, measured on tasks that are never trained on.

An eval is labelled with the version it held while it ran, or, where weights were not held, with the versions its tokens
came from. A rollout that failed by the system's doing counts as missing, not as zero.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ramify.errors import EnvironmentChanged, Failure, RamifyError
from ramify.evals.stats import choose_ks, clustered_mean, estimate_pass_rates, safe_mean
from ramify.orchestrate.attempt_dispatcher import ConnectedSource, derive_seed
from ramify.orchestrate.config import EvalSourceConfig
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.store import RolloutRecord, RunStore
from ramify.store.run_log import MetricPoint
from ramify.store.summary import REVISION_KEY, summarize_rollout
from ramify.trace import Trace

MAX_CONCURRENT_ROLLOUTS = 64  # rollouts of an eval


class OnlineEvaluator:
    """The evals of a run. `report` is told the values of each one that was done."""

    def __init__(
        self,
        sources: Mapping[str, tuple[EvalSourceConfig, ConnectedSource]],
        weight_updater: WeightUpdater,
        store: RunStore,
        *,
        seed: int,
        on_result: Callable[[int, dict[str, float]], None],
        on_failure: Callable[[str, Failure], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._sources, self._weight_updater, self._store, self._seed = sources, weight_updater, store, seed
        self._on_result, self._on_failure, self._on_progress = on_result, on_failure, on_progress
        self.started_at: dict[str, float] = {}  # source: since when
        self._last_evaluated_step: dict[str, int] = {}  # the version each source was last evaluated at

    def restore(self, metrics: Iterable[MetricPoint]) -> None:
        """Go on where an earlier process stopped: what it measured is not measured again."""
        for metric in metrics:
            self._last_evaluated_step[metric.name.removeprefix("eval/").removesuffix("/avg")] = (
                metric.step
            )  # it may hold a slash

    def get_due_sources(self, step: int, *, is_last: bool = False) -> list[str]:
        """The sources to be evaluated at a version: at the first, at the last, and when an interval has passed."""
        return [
            name for name, (config, _) in self._sources.items() if self._is_due(name, config.interval, step, is_last)
        ]

    def _is_due(self, name: str, interval: int | None, step: int, is_last: bool) -> bool:
        before = self._last_evaluated_step.get(name)
        if before is None or (is_last and step > before):
            return True
        return interval is not None and step // interval > before // interval

    async def run(self, step: int, names: list[str]) -> None:
        """Evaluate these sources at a version."""
        self._last_evaluated_step |= dict.fromkeys(names, step)
        async with asyncio.TaskGroup() as together:
            for name in names:
                together.create_task(self._evaluate_source(name, step), name=f"eval {name} at {step}")

    async def _evaluate_source(self, name: str, step: int) -> None:
        config, served = self._sources[name]
        uses_run_engines = config.endpoint is None
        hold_weights = uses_run_engines if config.hold_weights is None else config.hold_weights
        self.started_at[name] = start = time.monotonic()
        try:
            async with self._weight_updater.hold() if hold_weights else contextlib.nullcontext():
                if hold_weights and self._weight_updater.served_version is not None:
                    step = (
                        self._weight_updater.served_version.step
                    )  # a newer version may have been quicker than the eval
                found = await self._run_rollouts(name, config, served, step)
        finally:
            del self.started_at[name]
        self._on_result(
            step, {**_compute_metrics(f"eval/{name}", config, found), f"eval/{name}/seconds": time.monotonic() - start}
        )

    async def _run_rollouts(
        self, name: str, config: EvalSourceConfig, source: ConnectedSource, step: int
    ) -> dict[str, list[Trace]]:
        gate = asyncio.Semaphore(MAX_CONCURRENT_ROLLOUTS)
        tasks = config.num_tasks if source.num_tasks is None else min(source.num_tasks, config.num_tasks)
        found: dict[str, list[Trace]] = {str(number): [] for number in range(tasks)}

        async def rollout(number: int, repetition: int) -> list[Trace]:
            id = f"eval.{name}.{step}.{number}.{repetition}"
            async with gate:
                traces = await self._run_with_retries(source, number, id, repetition, f"{name}:{number}")
            self._on_progress()
            return traces

        async def task(number: int) -> None:
            async with asyncio.TaskGroup() as together:
                runs = [together.create_task(rollout(number, each)) for each in range(config.repetitions)]
            episodes = {each: run.result() for each, run in enumerate(runs) if run.result()}
            valid_traces = [traces[0] for traces in episodes.values() if _find_system_failure(traces) is None]
            if source.has_group_rewards and valid_traces:
                with contextlib.suppress(RamifyError):  # it was told, and a reward that is due counts as missing
                    await source.add_group_rewards(
                        valid_traces, lambda failure: self._on_failure(f"eval/{name}", failure)
                    )
            for repetition, traces in episodes.items():
                row = _build_record(name, step, number, repetition, traces, source.revision)
                await self._store.add_rollout(row, traces)
            found[str(number)] += [trace for trace in valid_traces if None not in trace.rewards.values()]

        async with asyncio.TaskGroup() as together:
            for number in range(tasks):
                together.create_task(task(number))
        return found

    async def _run_with_retries(
        self, source: ConnectedSource, task_number: int, rollout_id: str, repetition: int, seed: str
    ) -> list[Trace]:
        """One rollout, asked for again while what went wrong may pass; nothing if it did not."""
        for _ in range(source.max_tries):
            try:
                task = await source.tasks.get_task(task_number)
                ran = await source.client.run(
                    task,
                    id=rollout_id,
                    group=rollout_id,
                    attempt=repetition,
                    seed=derive_seed(self._seed, seed),
                    environment_digest=source.environment_digest,
                    timeout=source.get_attempt_timeout(task),
                )
                traces = list(ran.episode.traces)
                if (failure := _find_system_failure(traces)) is not None:
                    self._on_failure(f"eval/{source.name}", failure)
                return traces
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                self._on_failure(f"eval/{source.name}", failure := Failure.from_exception(error))
                if not failure.retryable:
                    break
                await source.wait_before_retry(failure)
        return []


def _find_system_failure(traces: Sequence[Trace]) -> Failure | None:
    """What the system did to a rollout, if it did."""
    return next((error for trace in traces for error in trace.errors if error.blame == "system"), None)


def _build_record(
    name: str, step: int, task_number: int, repetition: int, traces: Sequence[Trace], revision: int
) -> RolloutRecord:
    failure = _find_system_failure(traces)
    return RolloutRecord(
        traces[0].episode,
        str(task_number),
        repetition,
        f"eval/{name}",
        traces[0].reward,
        None if failure is None else failure.name,
        {**summarize_rollout(traces, failure), "step": step, REVISION_KEY: revision},
    )


def _compute_metrics(prefix: str, config: EvalSourceConfig, traces_by_task: dict[str, list[Trace]]) -> dict[str, float]:
    rewards = {
        task: [trace.reward for trace in traces if trace.reward is not None] for task, traces in traces_by_task.items()
    }
    mean = clustered_mean(rewards.values())
    values: dict[str, float] = {
        f"{prefix}/missing": float(sum(len(each) < config.repetitions for each in traces_by_task.values()))
    }
    if not any(traces_by_task.values()):
        return values
    if mean is not None:
        values[f"{prefix}/avg"] = mean.mean
        if mean.stderr is not None:
            values[f"{prefix}/error"] = mean.stderr
    for k in choose_ks(config.repetitions):
        if (pass_rates := estimate_pass_rates(rewards.values(), k, config.threshold)) is not None:
            values[f"{prefix}/pass@{k}"], values[f"{prefix}/pass^{k}"] = pass_rates[0].mean, pass_rates[1].mean
    traces = [trace for each in traces_by_task.values() for trace in each]
    names = {name for trace in traces for name in trace.metrics}
    metrics: dict[str, Any] = {
        name: [trace.metrics[name] for trace in traces if name in trace.metrics] for name in names
    }
    values |= {f"{prefix}/metric/{name}": safe_mean(numbers) for name, numbers in metrics.items()}
    values[f"{prefix}/truncated"] = safe_mean([trace.is_truncated for trace in traces])
    return values
