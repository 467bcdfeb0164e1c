"""The progress of an eval: everything a display shows. The loop that runs the eval updates it; displays only read."""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ramify.rollout.evals.stats import Estimate, clustered_mean
from ramify.rollout.evals.summary import total_seconds
from ramify.run.store import RolloutRecord

NUM_SLOWEST = 5


@dataclass(slots=True)
class RunningRollout:
    """A rollout in flight: its phase, and the number of model calls so far."""

    id: str
    started_at: float
    phase: str = "waiting"
    calls: int = 0

    @property
    def elapsed(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self.started_at


@dataclass(slots=True)
class EvalProgress:
    """Counts over all rollouts of the run, and rates since this start.

    `rows` are the stored rollouts by id, `running` those in flight, `total` is the number of planned rollouts.
    """

    title: str
    total: int
    rows: dict[str, RolloutRecord] = field(default_factory=dict[str, RolloutRecord])
    running: dict[str, RunningRollout] = field(default_factory=dict[str, RunningRollout])
    started_at: float = field(default_factory=time.monotonic)
    finished_this_start: int = 0
    output_tokens_this_start: int = 0

    def start_clock(self) -> None:
        """Measure rates from now on; call it when the first rollout starts."""
        self.started_at = time.monotonic()

    def start_rollout(self, id: str) -> None:
        """Record that a rollout starts."""
        self.running[id] = RunningRollout(id, time.monotonic())

    def update_rollout(self, id: str, phase: str, calls: int) -> None:
        """Record that a rollout enters a phase, or has finished a model call (`turn`)."""
        if (running := self.running.get(id)) is not None:
            running.phase = running.phase if phase == "turn" else phase
            running.calls = calls

    def finish_rollout(self, row: RolloutRecord) -> None:
        """Record that a rollout has been stored."""
        self.running.pop(row.id, None)
        self.rows[row.id] = row
        self.finished_this_start += 1
        self.output_tokens_this_start += int(row.summary.get("output", 0))

    @property
    def num_completed(self) -> int:
        """Number of rollouts without a system failure."""
        return sum(row.failure is None for row in self.rows.values())

    @property
    def num_failed(self) -> int:
        """Number of rollouts with a system failure."""
        return len(self.rows) - self.num_completed

    @property
    def elapsed(self) -> float:
        """Seconds since `start_clock`."""
        return time.monotonic() - self.started_at

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated seconds until the end; None before the first rollout has finished."""
        waiting = self.total - len(self.rows)
        return self.elapsed / self.finished_this_start * waiting if self.finished_this_start else None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second, of finished rollouts only."""
        return self.output_tokens_this_start / max(self.elapsed, 1e-9)

    @property
    def reward(self) -> Estimate | None:
        """The mean reward; None if no rollout has one."""
        return clustered_mean(group_rewards_by_task(self.rows.values()).values())

    @property
    def token_counts(self) -> tuple[int, int]:
        """Prompt and sampled tokens, as counted by the servers."""
        return count_tokens(self.rows.values())

    @property
    def slowest(self) -> list[tuple[str, float, str]]:
        """(id, seconds, phase or stop reason) of the slowest rollouts, finished or not."""
        durations = [(running.id, running.elapsed, running.phase) for running in self.running.values()]
        durations += [
            (row.id, total_seconds(row), row.failure or row.summary.get("stop", "")) for row in self.rows.values()
        ]
        return sorted(durations, key=lambda item: -item[1])[:NUM_SLOWEST]


def group_rewards_by_task(rows: Iterable[RolloutRecord]) -> dict[tuple[str, str], list[float]]:
    """Return the rewards of the rollouts without a system failure, by source and task."""
    rewards: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.failure is None and row.reward is not None:
            rewards.setdefault((row.source, row.task), []).append(row.reward)
    return rewards


def count_tokens(rows: Collection[RolloutRecord]) -> tuple[int, int]:
    """Return the prompt and the sampled tokens of all rollouts."""
    prompt, sampled = (sum(int(row.summary.get(key, 0)) for row in rows) for key in ("input", "output"))
    return prompt, sampled


def count_errors(rows: Iterable[RolloutRecord]) -> Counter[str]:
    """Return how many rollouts had each error, by name."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({*row.summary.get("errors", {}), *([row.failure] if row.failure else [])})
    return counts
