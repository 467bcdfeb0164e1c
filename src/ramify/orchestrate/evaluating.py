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
from ramify.orchestrate.config import EvalSourceConfig
from ramify.orchestrate.sampling import Served, seed_of
from ramify.orchestrate.weights import Weights
from ramify.store import RolloutRecord, RunStore
from ramify.store.run_log import MetricPoint
from ramify.store.summary import REVISION_KEY, summarize_rollout
from ramify.trace import Trace

AT_ONCE = 64  # rollouts of an eval


class Evaluating:
    """The evals of a run. `report` is told the values of each one that was done."""

    def __init__(
        self,
        sources: Mapping[str, tuple[EvalSourceConfig, Served]],
        weights: Weights,
        store: RunStore,
        *,
        seed: int,
        report: Callable[[int, dict[str, float]], None],
        failed: Callable[[str, Failure], None],
        moved: Callable[[], None],
    ) -> None:
        self._sources, self._weights, self._store, self._seed = sources, weights, store, seed
        self._report, self._failed, self._moved = report, failed, moved
        self.running: dict[str, float] = {}  # source: since when
        self._last: dict[str, int] = {}  # the version each source was last evaluated at

    def restore(self, known: Iterable[MetricPoint]) -> None:
        """Go on where an earlier process stopped: what it measured is not measured again."""
        for metric in known:
            self._last[metric.name.removeprefix("eval/").removesuffix("/avg")] = metric.step  # it may hold a slash

    def due(self, step: int, *, last: bool = False) -> list[str]:
        """The sources to be evaluated at a version: at the first, at the last, and when an interval has passed."""
        return [name for name, (config, _) in self._sources.items() if self._is_due(name, config.interval, step, last)]

    def _is_due(self, name: str, interval: int | None, step: int, last: bool) -> bool:
        before = self._last.get(name)
        if before is None or (last and step > before):
            return True
        return interval is not None and step // interval > before // interval

    async def run(self, step: int, names: list[str]) -> None:
        """Evaluate these sources at a version."""
        self._last |= dict.fromkeys(names, step)
        async with asyncio.TaskGroup() as together:
            for name in names:
                together.create_task(self._one(name, step), name=f"eval {name} at {step}")

    async def _one(self, name: str, step: int) -> None:
        config, served = self._sources[name]
        ours = config.endpoint is None
        hold = ours if config.hold_weights is None else config.hold_weights
        self.running[name] = start = time.monotonic()
        try:
            async with self._weights.hold() if hold else contextlib.nullcontext():
                if hold and self._weights.serving is not None:
                    step = self._weights.serving.step  # a newer version may have been quicker than the eval
                found = await self._rollouts(name, config, served, step)
        finally:
            del self.running[name]
        self._report(step, {**_values(f"eval/{name}", config, found), f"eval/{name}/seconds": time.monotonic() - start})

    async def _rollouts(self, name: str, config: EvalSourceConfig, served: Served, step: int) -> dict[str, list[Trace]]:
        gate = asyncio.Semaphore(AT_ONCE)
        tasks = config.num_tasks if served.count is None else min(served.count, config.num_tasks)
        found: dict[str, list[Trace]] = {str(number): [] for number in range(tasks)}

        async def rollout(number: int, repetition: int) -> list[Trace]:
            id = f"eval.{name}.{step}.{number}.{repetition}"
            async with gate:
                traces = await self._traces(served, number, id, repetition, f"{name}:{number}")
            self._moved()
            return traces

        async def task(number: int) -> None:
            async with asyncio.TaskGroup() as together:
                runs = [together.create_task(rollout(number, each)) for each in range(config.repetitions)]
            episodes = {each: run.result() for each, run in enumerate(runs) if run.result()}
            counted = [traces[0] for traces in episodes.values() if _failure(traces) is None]
            if served.compares and counted:
                with contextlib.suppress(RamifyError):  # it was told, and a reward that is due counts as missing
                    await served.compare(counted, lambda failure: self._failed(f"eval/{name}", failure))
            for repetition, traces in episodes.items():
                row = _row(name, step, number, repetition, traces, served.revision)
                await self._store.add_rollout(row, traces)
            found[str(number)] += [trace for trace in counted if None not in trace.rewards.values()]

        async with asyncio.TaskGroup() as together:
            for number in range(tasks):
                together.create_task(task(number))
        return found

    async def _traces(self, served: Served, number: int, id: str, repetition: int, seed: str) -> list[Trace]:
        """One rollout, asked for again while what went wrong may pass; nothing if it did not."""
        for _ in range(served.tries):
            try:
                task = await served.tasks.get(number)
                ran = await served.client.run(
                    task,
                    id=id,
                    group=id,
                    attempt=repetition,
                    seed=seed_of(self._seed, seed),
                    environment_digest=served.environment,
                    timeout=served.deadline_of(task),
                )
                traces = list(ran.episode.traces)
                if (failure := _failure(traces)) is not None:
                    self._failed(f"eval/{served.name}", failure)
                return traces
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                self._failed(f"eval/{served.name}", failure := Failure.from_exception(error))
                if not failure.retryable:
                    break
                await served.pause(failure)
        return []


def _failure(traces: Sequence[Trace]) -> Failure | None:
    """What the system did to a rollout, if it did."""
    return next((error for trace in traces for error in trace.errors if error.blame == "system"), None)


def _row(name: str, step: int, number: int, repetition: int, traces: Sequence[Trace], revision: int) -> RolloutRecord:
    failure = _failure(traces)
    return RolloutRecord(
        traces[0].episode,
        str(number),
        repetition,
        f"eval/{name}",
        traces[0].reward,
        None if failure is None else failure.name,
        {**summarize_rollout(traces, failure), "step": step, REVISION_KEY: revision},
    )


def _values(prefix: str, config: EvalSourceConfig, found: dict[str, list[Trace]]) -> dict[str, float]:
    rewards = {task: [trace.reward for trace in traces if trace.reward is not None] for task, traces in found.items()}
    mean = clustered_mean(rewards.values())
    values: dict[str, float] = {
        f"{prefix}/missing": float(sum(len(each) < config.repetitions for each in found.values()))
    }
    if not any(found.values()):
        return values
    if mean is not None:
        values[f"{prefix}/avg"] = mean.mean
        if mean.stderr is not None:
            values[f"{prefix}/error"] = mean.stderr
    for k in choose_ks(config.repetitions):
        if (both := estimate_pass_rates(rewards.values(), k, config.threshold)) is not None:
            values[f"{prefix}/pass@{k}"], values[f"{prefix}/pass^{k}"] = both[0].mean, both[1].mean
    traces = [trace for each in found.values() for trace in each]
    names = {name for trace in traces for name in trace.metrics}
    metrics: dict[str, Any] = {
        name: [trace.metrics[name] for trace in traces if name in trace.metrics] for name in names
    }
    values |= {f"{prefix}/metric/{name}": safe_mean(numbers) for name, numbers in metrics.items()}
    values[f"{prefix}/truncated"] = safe_mean([trace.is_truncated for trace in traces])
    return values
