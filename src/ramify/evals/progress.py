"""Where an eval stands: all that a display shows, kept by the loop that runs it. A display only reads."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ramify.evals.stats import Estimate, clustered_mean
from ramify.evals.summary import seconds
from ramify.store import RolloutRecord

SLOWEST = 5


@dataclass(slots=True)
class Running:
    """One rollout that is on its way."""

    id: str
    started: float
    phase: str = "waiting"
    calls: int = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(slots=True)
class Progress:
    """Counts over all rollouts of the run, and the rate of this start."""

    title: str
    total: int
    rows: dict[str, RolloutRecord] = field(default_factory=dict[str, RolloutRecord])
    running: dict[str, Running] = field(default_factory=dict[str, Running])
    started: float = field(default_factory=time.monotonic)
    finished_now: int = 0
    output_now: int = 0

    def start(self) -> None:
        """Rollouts begin now: rates count from here."""
        self.started = time.monotonic()

    def begin(self, id: str) -> None:
        """A rollout starts."""
        self.running[id] = Running(id, time.monotonic())

    def watch(self, id: str, phase: str, calls: int) -> None:
        """A rollout enters a phase, or (`turn`) has recorded a call."""
        if (running := self.running.get(id)) is not None:
            running.phase = running.phase if phase == "turn" else phase
            running.calls = calls

    def end(self, row: RolloutRecord) -> None:
        """A rollout is kept."""
        self.running.pop(row.id, None)
        self.rows[row.id] = row
        self.finished_now += 1
        self.output_now += int(row.summary.get("output", 0))

    @property
    def done(self) -> int:
        """Rollouts that count."""
        return sum(row.failure is None for row in self.rows.values())

    @property
    def failed(self) -> int:
        """Rollouts that the system failed."""
        return sum(row.failure is not None for row in self.rows.values())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds to the end at the rate so far; None while there is no rate."""
        waiting = self.total - len(self.rows)
        return self.elapsed / self.finished_now * waiting if self.finished_now else None

    @property
    def rate(self) -> float:
        """Sampled tokens a second, finished rollouts only."""
        return self.output_now / max(self.elapsed, 1e-9)

    @property
    def reward(self) -> Estimate | None:
        return clustered_mean(by_task(self.rows.values()).values())

    @property
    def metrics(self) -> dict[str, float]:
        return means(self.rows.values(), "metrics")

    @property
    def errors(self) -> Counter[str]:
        return error_counts(self.rows.values())

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and sampled tokens, as the servers counted them."""
        rows = self.rows.values()
        return sum(int(row.summary.get("input", 0)) for row in rows), sum(
            int(row.summary.get("output", 0)) for row in rows
        )

    @property
    def slowest(self) -> list[tuple[str, float, str]]:
        """(rollout, seconds, phase) of the slowest, finished or not."""
        found = [(running.id, running.seconds, running.phase) for running in self.running.values()]
        found += [(row.id, seconds(row), row.failure or row.summary.get("stop", "")) for row in self.rows.values()]
        return sorted(found, key=lambda item: -item[1])[:SLOWEST]


def by_task(rows: Iterable[RolloutRecord]) -> dict[tuple[str, str], list[float]]:
    """The rewards of the rollouts that count, by source and task."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.failure is None and row.reward is not None:
            found.setdefault((row.source, row.task), []).append(row.reward)
    return found


def means(rows: Iterable[RolloutRecord], table: str) -> dict[str, float]:
    """The mean of each entry of a table of the summary, over the rollouts that count and have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.failure is None:
            for name, value in row.summary.get(table, {}).items():
                if value is not None:
                    values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def error_counts(rows: Iterable[RolloutRecord]) -> Counter[str]:
    """How many rollouts met each error."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update({*row.summary.get("errors", {}), *([row.failure] if row.failure else [])})
    return found
