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

FAILURES = 20  # that are remembered
WINDOW = 60.0  # seconds over which speeds are measured


@dataclass(slots=True)
class _Judged:
    """Groups since the last batch was cut."""

    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    groups: int = 0
    trainable: int = 0
    rollouts: int = 0
    trainable_rollouts: int = 0

    @property
    def reward(self) -> float | None:
        everything = [reward for rewards in self.rewards.values() for reward in rewards]
        return safe_mean(everything) if everything else None


class Progress:
    """The run's numbers. `sink` is told what the journal is told."""

    def __init__(self, journal: RunLog, sink: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
        self._journal, self._sink = journal, sink
        self._judged = _Judged()
        self._rollouts: deque[tuple[float, int]] = deque()  # (when, tokens)
        self.moved = time.monotonic()
        self.failures: deque[dict[str, Any]] = deque(maxlen=FAILURES)
        self.failed: Counter[str] = Counter()
        self._logged_faults: set[str] = set()
        self.faults: dict[str, tuple[int, str]] = {}  # by source, how often its own code failed, and the last time how
        self.rewards: list[float] = [
            metric.value for metric in journal.metrics("reward/all/mean")
        ]  # of every step, for the curve
        self._trainable: tuple[int, int] | None = None  # of the last step
        self.evals: dict[str, dict[str, float]] = {}
        self.last: dict[str, float] = {}
        self.finished: list[Trace] = []  # a few, to be shown

    @property
    def reward(self) -> float | None:
        """The mean of the last step; before the first, of what was judged so far."""
        return self.rewards[-1] if self.rewards else self._judged.reward

    @property
    def trainable(self) -> tuple[int, int]:
        """Rollouts that could be trained on and all that were judged, of the last step; before the first, so far."""
        return self._trainable or (self._judged.trainable_rollouts, self._judged.rollouts)

    def move(self) -> None:
        """The run is not stuck."""
        self.moved = time.monotonic()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, for the tables and the sinks."""
        self._journal.log_metrics(step, values)
        self.last |= values
        if self._sink is not None:
            self._sink(step, values)

    def settled(
        self, group: GroupRecord, traces: list[Trace], trainable: bool, fired: Mapping[str, list[bool]]
    ) -> None:
        """A group was judged; `fired` says by filter, of each trace, whether it did."""
        judged, now = self._judged, time.monotonic()
        judged.groups += 1
        judged.trainable += trainable
        judged.rollouts += len(traces)
        judged.trainable_rollouts += len(traces) if trainable else 0
        for trace in traces:
            self._rollouts.append((now, trace.graph.logprobs.size))
            if trace.reward is not None:
                judged.rewards[group.source].append(trace.reward)
            for name, value in self._told(group.source, trace):
                judged.metrics[name].append(value)
        for name, each in fired.items():
            judged.metrics[f"filter/{name}"] += map(float, each)
        self.finished = traces
        while self._rollouts and self._rollouts[0][0] < now - WINDOW:
            self._rollouts.popleft()

    def _told(self, source: str, trace: Trace) -> Iterable[tuple[str, float]]:
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

    def cut(self, ages: Mapping[int, list[int]]) -> None:
        """Batches were decided, with the ages of their groups: what was judged since the last belongs to their steps.

        One late group can decide several; they then share the numbers.
        """
        judged, self._judged = self._judged, _Judged()
        reward = judged.reward
        self.moved = time.monotonic()
        values = {f"reward/{source}/mean": safe_mean(rewards) for source, rewards in judged.rewards.items()}
        values |= {name: safe_mean(numbers) for name, numbers in judged.metrics.items()}
        if reward is not None:
            values["reward/all/mean"] = reward
        if judged.groups:
            values["trainable"] = judged.trainable / judged.groups
            self._trainable = (judged.trainable_rollouts, judged.rollouts)
        rollouts, tokens = self.speed()
        values |= {"rollouts_per_s": rollouts, "tokens_per_s": tokens, "rollouts": judged.rollouts / max(1, len(ages))}
        for step, old in ages.items():
            stale = {"staleness/mean": safe_mean(old), "staleness/max": float(max(old))} if old else {}
            self.record(step, values | stale)
            self.rewards += [] if reward is None else [reward]

    def speed(self) -> tuple[float, float]:
        """Rollouts and sampled tokens a second."""
        if len(self._rollouts) < 2:
            return 0.0, 0.0
        span = max(1e-3, time.monotonic() - self._rollouts[0][0])
        return len(self._rollouts) / span, sum(tokens for _, tokens in self._rollouts) / span

    def trouble(self, where: str, failure: Failure) -> None:
        """Something failed that is run again or dropped."""
        self.failed[failure.name] += 1
        if failure.name == EnvironmentFault.name:
            self.faults[where] = (self.faults.get(where, (0, ""))[0] + 1, failure.message)
            self._log_fault(f"{where}: {failure.name}: {failure.message}")
        told = {"time": time.time(), "where": where, "name": failure.name, "message": failure.message}
        self.failures.append(told)
        self._journal.log_event("failure", **told)

    def _log_fault(self, line: str) -> None:
        """Print what code of an environment raised: each message once, the first few of them."""
        if line not in self._logged_faults and len(self._logged_faults) < FAILURES:
            self._logged_faults.add(line)
            print(line, flush=True)
