"""What a run tells about itself while it goes: the numbers of each step, its last failures, when it last moved.

Rewards are those of all groups that were judged, also of those that teach nothing: a run whose easy tasks are all
solved must not look worse for it.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.errors import EnvironmentFault, Failure
from ramify.evals.stats import safe_mean
from ramify.store.ledger import GroupRecord
from ramify.store.run_log import RunLog
from ramify.trace import Trace

MAX_RECENT_FAILURES = 20  # that are remembered
THROUGHPUT_WINDOW = 60.0  # seconds over which speeds are measured


@dataclass(slots=True)
class _StepTotals:
    """Groups since the last batch was cut."""

    rewards_by_source: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    values_by_metric: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_groups: int = 0
    num_trainable_groups: int = 0
    num_rollouts: int = 0
    num_trainable_rollouts: int = 0

    @property
    def mean_reward(self) -> float | None:
        everything = [reward for rewards in self.rewards_by_source.values() for reward in rewards]
        return safe_mean(everything) if everything else None


class RunProgress:
    """The run's numbers. `sink` is told what the journal is told."""

    def __init__(self, journal: RunLog, on_metrics: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
        self._journal, self._on_metrics = journal, on_metrics
        self._totals = _StepTotals()
        self._recent_rollouts: deque[tuple[float, int]] = deque()  # (when, tokens)
        self.last_progress_time = time.monotonic()
        self.recent_failures: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT_FAILURES)
        self.failure_counts: Counter[str] = Counter()
        self._logged_faults: set[str] = set()
        self.environment_faults: dict[
            str, tuple[int, str]
        ] = {}  # by source, how often its own code failed, and the last time how
        self.reward_history: list[float] = [
            metric.value for metric in journal.metrics("reward/all/mean")
        ]  # of every step, for the curve
        self._last_trainable_counts: tuple[int, int] | None = None  # of the last step
        self.evals: dict[str, dict[str, float]] = {}
        self.latest_metrics: dict[str, float] = {}
        self.finished: list[Trace] = []  # a few, to be shown

    @property
    def mean_reward(self) -> float | None:
        """The mean of the last step; before the first, of what was judged so far."""
        return self.reward_history[-1] if self.reward_history else self._totals.mean_reward

    @property
    def trainable_counts(self) -> tuple[int, int]:
        """Rollouts that could be trained on and all that were judged, of the last step; before the first, so far."""
        return self._last_trainable_counts or (self._totals.num_trainable_rollouts, self._totals.num_rollouts)

    def mark_progress(self) -> None:
        """The run is not stuck."""
        self.last_progress_time = time.monotonic()

    def record_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, for the tables and the sinks."""
        self._journal.log_metrics(step, values)
        self.latest_metrics |= values
        if self._on_metrics is not None:
            self._on_metrics(step, values)

    def record_group(
        self, group: GroupRecord, traces: list[Trace], is_trainable: bool, fired_by_filter: Mapping[str, list[bool]]
    ) -> None:
        """A group was judged; `fired` says by filter, of each trace, whether it did."""
        judged, now = self._totals, time.monotonic()
        judged.num_groups += 1
        judged.num_trainable_groups += is_trainable
        judged.num_rollouts += len(traces)
        judged.num_trainable_rollouts += len(traces) if is_trainable else 0
        for trace in traces:
            self._recent_rollouts.append((now, trace.graph.logprobs.size))
            if trace.reward is not None:
                judged.rewards_by_source[group.source].append(trace.reward)
            for name, value in self._iter_trace_metrics(group.source, trace):
                judged.values_by_metric[name].append(value)
        for name, each in fired_by_filter.items():
            judged.values_by_metric[f"filter/{name}"] += map(float, each)
        self.finished = traces
        while self._recent_rollouts and self._recent_rollouts[0][0] < now - THROUGHPUT_WINDOW:
            self._recent_rollouts.popleft()

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
        """Batches were decided, with the ages of their groups: what was judged since the last belongs to their steps.

        One late group can decide several; they then share the numbers.
        """
        judged, self._totals = self._totals, _StepTotals()
        reward = judged.mean_reward
        self.last_progress_time = time.monotonic()
        values = {f"reward/{source}/mean": safe_mean(rewards) for source, rewards in judged.rewards_by_source.items()}
        values |= {name: safe_mean(numbers) for name, numbers in judged.values_by_metric.items()}
        if reward is not None:
            values["reward/all/mean"] = reward
        if judged.num_groups:
            values["trainable"] = judged.num_trainable_groups / judged.num_groups
            self._last_trainable_counts = (judged.num_trainable_rollouts, judged.num_rollouts)
        rollouts, tokens = self.get_throughput()
        values |= {
            "rollouts_per_s": rollouts,
            "tokens_per_s": tokens,
            "rollouts": judged.num_rollouts / max(1, len(staleness_by_step)),
        }
        for step, staleness in staleness_by_step.items():
            staleness_metrics = (
                {"staleness/mean": safe_mean(staleness), "staleness/max": float(max(staleness))} if staleness else {}
            )
            self.record_metrics(step, values | staleness_metrics)
            self.reward_history += [] if reward is None else [reward]

    def get_throughput(self) -> tuple[float, float]:
        """Rollouts and sampled tokens a second."""
        if len(self._recent_rollouts) < 2:
            return 0.0, 0.0
        span = max(1e-3, time.monotonic() - self._recent_rollouts[0][0])
        return len(self._recent_rollouts) / span, sum(tokens for _, tokens in self._recent_rollouts) / span

    def record_failure(self, origin: str, failure: Failure) -> None:
        """Something failed that is run again or dropped."""
        self.failure_counts[failure.name] += 1
        if failure.name == EnvironmentFault.name:
            self.environment_faults[origin] = (self.environment_faults.get(origin, (0, ""))[0] + 1, failure.message)
            self._log_fault(f"{origin}: {failure.name}: {failure.message}")
        told = {"time": time.time(), "where": origin, "name": failure.name, "message": failure.message}
        self.recent_failures.append(told)
        self._journal.log_event("failure", **told)

    def _log_fault(self, line: str) -> None:
        """Print what code of an environment raised: each message once, the first few of them."""
        if line not in self._logged_faults and len(self._logged_faults) < MAX_RECENT_FAILURES:
            self._logged_faults.add(line)
            print(line, flush=True)
