"""Where an eval stands: all that a display shows, kept by the loop that runs it. A display only reads."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ramify.evals.stats import Estimate, clustered_mean
from ramify.evals.summary import total_seconds
from ramify.store import RolloutRecord

NUM_SLOWEST = 5


@dataclass(slots=True)
class RunningRollout:
    """One rollout that is on its way."""

    id: str
    started_at: float
    phase: str = "waiting"
    calls: int = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started_at


@dataclass(slots=True)
class EvalProgress:
    """Counts over all rollouts of the run, and the rate of this start."""

    title: str
    total: int
    rows: dict[str, RolloutRecord] = field(default_factory=dict[str, RolloutRecord])
    running: dict[str, RunningRollout] = field(default_factory=dict[str, RunningRollout])
    started_at: float = field(default_factory=time.monotonic)
    finished_this_start: int = 0
    output_tokens_this_start: int = 0

    def start_clock(self) -> None:
        """Rollouts begin now: rates count from here."""
        self.started_at = time.monotonic()

    def start_rollout(self, id: str) -> None:
        """A rollout starts."""
        self.running[id] = RunningRollout(id, time.monotonic())

    def update_rollout(self, id: str, phase: str, calls: int) -> None:
        """A rollout enters a phase, or (`turn`) has recorded a call."""
        if (running := self.running.get(id)) is not None:
            running.phase = running.phase if phase == "turn" else phase
            running.calls = calls

    def finish_rollout(self, row: RolloutRecord) -> None:
        """A rollout is kept."""
        self.running.pop(row.id, None)
        self.rows[row.id] = row
        self.finished_this_start += 1
        self.output_tokens_this_start += int(row.summary.get("output", 0))

    @property
    def num_completed(self) -> int:
        """Rollouts that count."""
        return sum(row.failure is None for row in self.rows.values())

    @property
    def num_failed(self) -> int:
        """Rollouts that the system failed."""
        return sum(row.failure is not None for row in self.rows.values())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the end at the rate so far; None while there is no rate."""
        waiting = self.total - len(self.rows)
        return self.elapsed / self.finished_this_start * waiting if self.finished_this_start else None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second, finished rollouts only."""
        return self.output_tokens_this_start / max(self.elapsed, 1e-9)

    @property
    def reward(self) -> Estimate | None:
        return clustered_mean(group_rewards_by_task(self.rows.values()).values())

    @property
    def metrics(self) -> dict[str, float]:
        return mean_by_name(self.rows.values(), "metrics")

    @property
    def error_counts(self) -> Counter[str]:
        return count_errors(self.rows.values())

    @property
    def token_counts(self) -> tuple[int, int]:
        """Prompt and sampled tokens, as the servers counted them."""
        rows = self.rows.values()
        return sum(int(row.summary.get("input", 0)) for row in rows), sum(
            int(row.summary.get("output", 0)) for row in rows
        )

    @property
    def slowest(self) -> list[tuple[str, float, str]]:
        """(rollout, seconds, phase) of the slowest, finished or not."""
        durations = [(running.id, running.elapsed, running.phase) for running in self.running.values()]
        durations += [
            (row.id, total_seconds(row), row.failure or row.summary.get("stop", "")) for row in self.rows.values()
        ]
        return sorted(durations, key=lambda item: -item[1])[:NUM_SLOWEST]


def group_rewards_by_task(rows: Iterable[RolloutRecord]) -> dict[tuple[str, str], list[float]]:
    """The rewards of the rollouts that count, by source and task."""
    rewards: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.failure is None and row.reward is not None:
            rewards.setdefault((row.source, row.task), []).append(row.reward)
    return rewards


def mean_by_name(rows: Iterable[RolloutRecord], summary_key: str) -> dict[str, float]:
    """The mean of each entry of a table of the summary, over the rollouts that count and have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.failure is None:
            for name, value in row.summary.get(summary_key, {}).items():
                if value is not None:
                    values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def count_errors(rows: Iterable[RolloutRecord]) -> Counter[str]:
    """How many rollouts met each error."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({*row.summary.get("errors", {}), *([row.failure] if row.failure else [])})
    return counts
