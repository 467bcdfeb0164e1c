"""The progress of an eval, which the loop that runs it updates, and how a log or a terminal shows it."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from ramify.core.display import Display, make_grid
from ramify.core.names import format_duration
from ramify.rollout.evals.rows import total_seconds
from ramify.rollout.evals.stats import Estimate, clustered_mean, mean_by_name
from ramify.run.store import RolloutRecord

NUM_SLOWEST = 5
REFRESH_INTERVAL = 0.25  # seconds
LOG_INTERVAL = 5.0  # seconds between log lines
MAX_RUNNING_SHOWN = 12


@dataclass(slots=True)
class RunningRollout:
    """A rollout in flight: its phase, and the number of model calls so far."""

    id: str
    started_at: float
    phase: str = "waiting"
    num_calls: int = 0

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

    def update_rollout(self, id: str, phase: str, num_calls: int) -> None:
        """Record that a rollout enters a phase, or has finished a model call (`turn`)."""
        if (running := self.running.get(id)) is not None:
            running.phase = running.phase if phase == "turn" else phase
            running.num_calls = num_calls

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


EvalDisplay = Display[EvalProgress]


class EvalContent:
    """What an eval shows. A log gets a line every LOG_INTERVAL seconds, one at the end, and one per system failure."""

    def __init__(self) -> None:
        self._next_log_time = 0.0
        self._num_rows_shown = 0

    def format_lines(self, progress: EvalProgress) -> Iterator[str]:
        """Yield the failures since the last call, and the progress if it is due."""
        new_rows = list(islice(progress.rows.values(), self._num_rows_shown, None))
        self._num_rows_shown += len(new_rows)
        for row in new_rows:
            if row.failure is not None:
                yield f"rollout {row.id} failed: {row.failure}: {row.summary.get('message', '')}"
        is_last = bool(new_rows) and len(progress.rows) == progress.total
        if is_last or time.monotonic() >= self._next_log_time:
            self._next_log_time = time.monotonic() + LOG_INTERVAL
            yield format_line(progress)

    def render_page(self, progress: EvalProgress) -> RenderableType:
        """Return the progress as a page: bar, rewards, metrics, errors, slowest and running rollouts."""
        remaining = "" if progress.remaining_seconds is None else f"{format_duration(progress.remaining_seconds)} left"
        head = make_grid()
        bar = ProgressBar(total=max(progress.total, 1), completed=len(progress.rows), width=40)
        head.add_row(Text(progress.title, style="bold"), bar, f"{len(progress.rows)}/{progress.total}", remaining)

        tokens_in, tokens_out = progress.token_counts
        stats_table = make_grid()
        stats_table.add_row("reward", format_estimate(progress.reward))
        valid_rows = (row for row in progress.rows.values() if row.failure is None)
        for name, value in sorted(mean_by_name(row.summary.get("metrics", {}) for row in valid_rows).items()):
            stats_table.add_row(name, f"{value:.3f}")
        stats_table.add_row("tokens", f"{tokens_in:,} in, {tokens_out:,} out, {progress.tokens_per_second:,.0f}/s")
        stats_table.add_row("elapsed", format_duration(progress.elapsed))
        for name, count in count_errors(progress.rows.values()).most_common():
            stats_table.add_row(Text(name, style="red"), str(count))

        slowest = make_grid("slowest", "seconds", "")
        for id, seconds, state in progress.slowest:
            slowest.add_row(id, f"{seconds:.1f}", state)
        running = make_grid("running", "seconds", "phase", "calls")
        for rollout in sorted(progress.running.values(), key=lambda rollout: rollout.started_at)[:MAX_RUNNING_SHOWN]:
            running.add_row(rollout.id, f"{rollout.elapsed:.1f}", rollout.phase, str(rollout.num_calls))
        if len(progress.running) > MAX_RUNNING_SHOWN:
            running.add_row(f"and {len(progress.running) - MAX_RUNNING_SHOWN} more")
        return Group(head, Text(), stats_table, Text(), slowest, Text(), running)


def format_line(progress: EvalProgress) -> str:
    """Return the progress as one line of `name=value` fields."""
    tokens_in, tokens_out = progress.token_counts
    fields = {
        "done": f"{progress.num_completed}/{progress.total}",
        "failed": progress.num_failed,
        "running": len(progress.running),
        "reward": format_estimate(progress.reward),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_per_s": f"{progress.tokens_per_second:.0f}",
        "left": "unknown" if progress.remaining_seconds is None else format_duration(progress.remaining_seconds),
    }
    return f"{progress.title} " + " ".join(f"{name}={value}" for name, value in fields.items())


def format_estimate(estimate: Estimate | None) -> str:
    """Return a mean with its standard error."""
    if estimate is None:
        return "none"
    return f"{estimate.mean:.3f}" if estimate.stderr is None else f"{estimate.mean:.3f}±{estimate.stderr:.3f}"
