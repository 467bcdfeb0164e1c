"""Metrics of each step, recent failures, and the time of the last progress of a run.

Rewards cover all scored groups, including those without a training signal: a run whose easy tasks are all solved must
not look worse for it.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ramify.core.errors import EnvironmentFault, Failure
from ramify.infer.client.replica import EngineLoad
from ramify.rollout.evals.stats import safe_mean
from ramify.run.state import EvalMetric, FailureEvent
from ramify.run.store.ledger import GroupRecord
from ramify.run.store.run_log import RunLog
from ramify.trace import Trace


class TrainedStep(NamedTuple):
    """A step that the trainer has reported."""

    step: int
    seconds: float  # since the step before
    metrics: Mapping[str, float]

    @property
    def ideal_training_seconds(self) -> float | None:
        """The least time for the training; None if it is unknown."""
        mfu = self.metrics.get("train/mfu")
        return None if mfu is None else mfu * self.metrics["train/seconds"]


class EngineTimeMeter:
    """Measures what the engines do between two trained steps, and how much of that time is ideal work.

    Engines report totals: the time they spend with each activity, and the least time that their devices need for the
    steps they have run. The latter and the trainer's share of peak operations, divided by the time from one step to
    the next, are the utilization.
    """

    def __init__(self) -> None:
        self._last_loads: Mapping[str, EngineLoad] = {}  # by URL

    def measure(self, trained: TrainedStep, loads: Mapping[str, EngineLoad]) -> dict[str, float]:
        """Return the metrics of a step, given the loads of the engines by URL.

        They are left out if they are unknown, if an engine was restarted, or if other engines than for the last step
        reported.
        """
        seconds = _subtract_totals(loads, self._last_loads)
        self._last_loads = loads
        sampling, training = seconds.pop("ideal", None), trained.ideal_training_seconds
        metrics = {f"time/engine/{activity}": value for activity, value in seconds.items()}
        if sampling is not None and training is not None:
            metrics["utilization"] = (sampling + training) / trained.seconds
        return metrics


def _subtract_totals(loads: Mapping[str, EngineLoad], last_loads: Mapping[str, EngineLoad]) -> dict[str, float]:
    """Return the seconds of each activity since the last loads, as means over the engines."""
    if not loads or loads.keys() != last_loads.keys():
        return {}
    every_load = (*loads.values(), *last_loads.values())
    differences = {
        activity: [load.seconds[activity] - last_loads[url].seconds[activity] for url, load in loads.items()]
        for activity in every_load[0].seconds
        if all(activity in load.seconds for load in every_load)
    }
    is_restarted = any(min(values) < 0 for values in differences.values())
    return {} if is_restarted else {activity: safe_mean(values) for activity, values in differences.items()}


MAX_RECENT_FAILURES = 20
THROUGHPUT_WINDOW = 20.0  # seconds over which throughput is measured, or since the batch before the last


@dataclass(slots=True)
class _StepTotals:
    """Totals of the groups that were scored since the last batch was formed."""

    rewards_by_source: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    values_by_metric: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_groups: int = 0
    num_trainable_groups: int = 0
    num_rollouts: int = 0
    num_trainable_rollouts: int = 0

    @property
    def mean_reward(self) -> float | None:
        all_rewards = [reward for rewards in self.rewards_by_source.values() for reward in rewards]
        return safe_mean(all_rewards) if all_rewards else None


class RunProgress:
    """The metrics and failures of a run. `on_metrics` gets every step and metrics that the run log gets.

    Attributes:
        last_progress_time: monotonic time of the last progress; the watchdog compares it with `stall_timeout`.
        recent_failures: the last failures, as the run log has them.
        failure_counts: number of failures by name.
        fruitless_attempts: by source, how many attempts failed in environment code or because of their agent, and the
            last failure.
        reward_history: mean reward of every step.
        evals: step and value of each eval metric.
        latest_metrics: last value of each metric.
    """

    def __init__(
        self,
        run_log: RunLog,
        on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_log, self._on_metrics, self._clock = run_log, on_metrics, clock
        self._totals = _StepTotals()
        self._recent_groups: deque[tuple[float, int, int]] = deque()  # monotonic time, rollouts and sampled tokens
        self._sampling_start = self.last_progress_time = clock()
        self._batch_times: deque[float] = deque(maxlen=2)  # monotonic times of the last two batches
        self.recent_failures: deque[FailureEvent] = deque(maxlen=MAX_RECENT_FAILURES)
        self.failure_counts: Counter[str] = Counter()
        self._logged_faults: set[str] = set()
        self.fruitless_attempts: dict[str, tuple[int, Failure]] = {}
        self.reward_history = [metric.value for metric in run_log.metrics("reward/all/mean")]
        self._next_step = len(self.reward_history)  # the first step without a batch
        self._last_trainable_counts: tuple[int, int] | None = None
        self.evals: dict[str, EvalMetric] = {}
        self.latest_metrics: dict[str, float] = {}

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the last step; before the first step, of all groups scored so far."""
        return self.reward_history[-1] if self.reward_history else self._totals.mean_reward

    @property
    def trainable_counts(self) -> tuple[int, int]:
        """Number of trainable and of all scored rollouts of the last step; before the first step, so far."""
        return self._last_trainable_counts or (self._totals.num_trainable_rollouts, self._totals.num_rollouts)

    def mark_progress(self) -> None:
        """Record that the run makes progress."""
        self.last_progress_time = self._clock()

    def mark_sampling_started(self) -> None:
        """Record that engines and env servers are up: throughput is measured from now on."""
        self._sampling_start = self._clock()

    def record_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step in the run log, and pass them to `on_metrics`."""
        self._run_log.log_metrics(step, values)
        self.latest_metrics |= values
        if self._on_metrics is not None:
            self._on_metrics(step, values)

    def record_group(
        self, group: GroupRecord, traces: list[Trace], is_trainable: bool, fired_by_filter: Mapping[str, list[bool]]
    ) -> None:
        """Add a scored group to the totals of the step."""
        totals = self._totals
        totals.num_groups += 1
        totals.num_trainable_groups += is_trainable
        totals.num_rollouts += len(traces)
        totals.num_trainable_rollouts += len(traces) if is_trainable else 0
        self._recent_groups.append((self._clock(), len(traces), sum(trace.completion_len for trace in traces)))
        for trace in traces:
            if trace.reward is not None:
                totals.rewards_by_source[group.source].append(trace.reward)
            for name, value in self._iter_trace_metrics(group.source, trace):
                totals.values_by_metric[name].append(value)
        for name, fired in fired_by_filter.items():
            totals.values_by_metric[f"filter/{name}"] += map(float, fired)

    def _iter_trace_metrics(self, source: str, trace: Trace) -> Iterable[tuple[str, float]]:
        yield "turns/mean", float(len(trace.sampled_nodes))
        yield "tokens/sampled", float(trace.graph.logprobs.size)
        yield "truncated", float(trace.is_truncated)
        yield "render/breaks", trace.metrics.get("render/breaks", 0.0)
        for name, value in trace.metrics.items():
            if not name.startswith("render/breaks"):
                yield f"metric/{source}/{name}", value
        for name, entry in trace.rewards.items():
            if entry is not None:
                yield f"reward/{source}/{name}", entry[0]

    def record_batches(self, staleness_by_step: Mapping[int, list[int]]) -> None:
        """Record the metrics of new batches, given the staleness of their groups by step.

        One late group can complete several batches, which then share the totals.
        """
        totals, self._totals = self._totals, _StepTotals()
        reward = totals.mean_reward
        self.mark_progress()
        self._batch_times.append(self._clock())
        values = {f"reward/{source}/mean": safe_mean(rewards) for source, rewards in totals.rewards_by_source.items()}
        values |= {name: safe_mean(numbers) for name, numbers in totals.values_by_metric.items()}
        if reward is not None:
            values["reward/all/mean"] = reward
        if totals.num_groups:
            values["trainable"] = totals.num_trainable_groups / totals.num_groups
            self._last_trainable_counts = (totals.num_trainable_rollouts, totals.num_rollouts)
        values["rollouts_per_s"], values["tokens_per_s"] = self.get_throughput()
        values["rollouts"] = totals.num_rollouts / max(1, len(staleness_by_step))
        values["time/unix"] = time.time()
        values |= {f"failures/{name}": float(count) for name, count in self.failure_counts.items()}
        self._next_step = max(staleness_by_step, default=-1) + 1
        for step, staleness in staleness_by_step.items():
            metrics = dict(values)
            if staleness:
                metrics |= {"staleness/mean": safe_mean(staleness), "staleness/max": float(max(staleness))}
            self.record_metrics(step, metrics)
            self.reward_history += [] if reward is None else [reward]

    def get_throughput(self) -> tuple[float, float]:
        """Return rollouts and sampled tokens per second, over the last THROUGHPUT_WINDOW seconds.

        The time is longer if a step takes longer, because groups are scored in bursts, and shorter if sampling has
        begun only now.
        """
        now = self._clock()
        window_start = min([now - THROUGHPUT_WINDOW, *self._batch_times])
        while self._recent_groups and self._recent_groups[0][0] < window_start:
            self._recent_groups.popleft()
        span = max(1e-3, now - max(window_start, self._sampling_start))
        num_rollouts = sum(rollouts for _, rollouts, _ in self._recent_groups)
        num_tokens = sum(tokens for _, _, tokens in self._recent_groups)
        return num_rollouts / span, num_tokens / span

    def record_failure(self, origin: str, failure: Failure) -> None:
        """Record a failure of the system or of an agent; `origin` is a source, or what else failed.

        The first few failures of environment code and of the policy are also printed, each message once.
        """
        self.failure_counts[failure.name] += 1
        if failure.name == EnvironmentFault.name or failure.blame == "policy":
            num_earlier = self.fruitless_attempts[origin][0] if origin in self.fruitless_attempts else 0
            self.fruitless_attempts[origin] = (num_earlier + 1, failure)
            line = f"{origin}: {failure.name}: {failure.message}"
            if line not in self._logged_faults and len(self._logged_faults) < MAX_RECENT_FAILURES:
                self._logged_faults.add(line)
                print(line, flush=True)
        event = FailureEvent(time.time(), origin, failure.name, failure.message)
        self.recent_failures.append(event)
        self._run_log.log_event("failure", **msgspec.structs.asdict(event))
        name = f"failures/{failure.name}"
        self._run_log.log_metrics(self._next_step, {name: float(self.failure_counts[failure.name])})
