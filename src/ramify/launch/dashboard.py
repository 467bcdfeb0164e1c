"""What the display of a run shows: a live dashboard in a terminal, lines everywhere else.

Both show the state of the run. The orchestrator's part may be missing: a run that is starting has no orchestrator yet.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ramify.core.display import Display, make_grid
from ramify.core.names import format_duration
from ramify.launch.status_line import (
    format_number,
    format_optional_score,
    format_ratio,
    format_status_line,
    get_reward_label,
    list_latest_eval_means,
)
from ramify.run.state import FailureEvent, OrchestratorState, ProcessState, ProcessStatus, RunState

REFRESH_INTERVAL = 0.5  # seconds between refreshes
LINE_INTERVAL = 10.0  # seconds between lines within one step
MAX_ERRORS = 5  # latest errors in the dashboard
SPARKLINE_CHARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 40  # of the progress bar and the reward curve
STALENESS_FORMATS = {"mean": ".1f", "max": ".0f"}
RunDisplay = Display[RunState]


class RunContent:
    """What a run shows. A log gets a line per step, one every LINE_INTERVAL seconds in a long step, and new errors."""

    def __init__(self) -> None:
        self._last_step, self._next_line_time, self._last_error_time = -1, 0.0, 0.0
        self._last_states: list[str] = []
        self._last_error_line = self._last_startup_wait = ""

    def format_lines(self, state: RunState) -> Iterator[str]:
        """Yield what is new since the last call."""
        status = state.orchestrator
        if status is None or status.is_starting:
            yield from self._format_startup(state.processes)
            startup_wait = "" if status is None else status.startup_wait
            if startup_wait and startup_wait != self._last_startup_wait:
                yield startup_wait
            self._last_startup_wait = startup_wait
            return
        yield from self._format_new_errors(status.errors)
        if status.step > self._last_step or time.monotonic() >= self._next_line_time:
            self._last_step, self._next_line_time = status.step, time.monotonic() + LINE_INTERVAL
            yield format_status_line(status)

    def render_page(self, state: RunState) -> RenderableType:
        """Return the dashboard."""
        return render_dashboard(state)

    def _format_startup(self, processes: Sequence[ProcessStatus]) -> Iterator[str]:
        states = [f"{process.name} {process.state.value}" for process in processes]
        if states != self._last_states and all(process.state is not ProcessState.ENDED for process in processes):
            yield ", ".join(states)
        self._last_states = states

    def _format_new_errors(self, errors: Sequence[FailureEvent]) -> Iterator[str]:
        """Yield new errors; consecutive identical errors are printed once."""
        for error in errors:
            line = f"{error.name}: {error.message}"
            if error.time > self._last_error_time and line != self._last_error_line:
                yield line
                self._last_error_line = line
            self._last_error_time = max(self._last_error_time, error.time)


def render_dashboard(state: RunState) -> RenderableType:
    """Render the dashboard: progress, metrics, what each process waits for, and the last errors."""
    parts: list[RenderableType] = []
    status = state.orchestrator
    if status is None or status.is_starting:
        has_restarted = any(process.restarts for process in state.processes)
        startup_wait = "" if status is None else status.startup_wait
        parts.append(Text(startup_wait or ("waiting for the orchestrator" if has_restarted else "starting")))
    else:
        parts += [_build_header(status), Text(), _build_stats(status)]
    waits = {} if status is None else {wait.who: f"waits for {wait.waits_for}" for wait in status.waits}
    rows = make_grid("process", "state", "pid", "restarts", "doing")
    for process in state.processes:
        name, style = process.name, _get_style(process)
        wait, pid, restarts = waits.pop(name, ""), str(process.pid or ""), str(process.restarts or "")
        label = f"{name} on {process.node}" if process.node else name
        rows.add_row(Text(label), Text(process.state, style), pid, restarts, Text(wait, overflow="ellipsis"))
    for name, wait in waits.items():  # components of the orchestrator
        rows.add_row(Text(f"  {name}", "dim"), "", "", "", Text(wait, overflow="ellipsis"))
    parts += [Text(), rows]
    if errors := status.errors[-MAX_ERRORS:] if status is not None else []:
        table = make_grid("last errors", "")
        for error in errors:
            table.add_row(Text(error.name, "red"), Text(error.message.splitlines()[0], overflow="ellipsis"))
        parts += [Text(), table]
    return Group(*parts)


def _get_style(process: ProcessStatus) -> str:
    styles = {ProcessState.READY: "green", ProcessState.STARTING: "yellow"}
    return styles.get(process.state, "red" if process.restarts else "dim")


def render_sparkline(values: Sequence[float], width: int = BAR_WIDTH) -> str:
    """Return a curve of the values as one line of at most `width` characters, scaled to their range."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKLINE_CHARS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKLINE_CHARS[round((mean - low) * scale)] for mean in means)


def _build_header(status: OrchestratorState) -> Table:
    header = make_grid()
    step, steps = status.step, status.max_steps or 1
    time_left = "" if status.eta_s is None else f"{format_duration(status.eta_s)} left"
    bar = ProgressBar(total=steps, completed=min(step, steps), width=BAR_WIDTH)
    header.add_row(Text(status.run, style="bold"), bar, f"step {step}/{steps}", time_left)
    return header


def _build_stats(status: OrchestratorState) -> Table:
    stats = make_grid()
    history = [value for value in status.reward_history if value is not None]
    stats.add_row(get_reward_label(status), f"{format_optional_score(status.reward)}  {render_sparkline(history)}")
    for name, value in list_latest_eval_means(status):
        stats.add_row(name, format_optional_score(value))
    stats.add_row("rollouts/s", format_number(status.rollouts_per_s, ".1f"))
    stats.add_row("tokens/s", format_number(status.tokens_per_s, ",.0f"))
    mean, maximum = (format_number(status.staleness.get(name), spec) for name, spec in STALENESS_FORMATS.items())
    stats.add_row("staleness", f"{mean} mean, {maximum} max")
    stats.add_row("trainable", format_ratio(status.trainable))
    counts = ", ".join(f"{count} {state}" for state, count in status.groups.items() if count)
    stats.add_row("groups", counts or "none yet")
    stats.add_row("committed", f"step {status.committed}, {status.state}")
    return stats
