"""What the display of a run shows: a live dashboard in a terminal, lines everywhere else.

Both show the status of the run (the reply of `/status`) and the processes that the supervisor has. The status may be
missing: a run that is starting has no orchestrator yet.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ramify.core.display import Display, make_grid
from ramify.core.durations import format_duration
from ramify.launch.process import ProcessState
from ramify.launch.supervisor import ProcessStatus
from ramify.rollout.evals.stats import format_score

REFRESH_INTERVAL = 0.5  # seconds between refreshes
LINE_INTERVAL = 10.0  # seconds between lines within one step
MAX_ERRORS = 5  # latest errors in the dashboard
SPARKLINE_CHARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 40  # of the progress bar and the reward curve

Status = dict[str, Any]


class RunState(NamedTuple):
    """What is known of a run: its status, None if the orchestrator does not answer, and its processes.

    `startup_wait` says what a starting orchestrator waits for.
    """

    status: Status | None
    processes: Sequence[ProcessStatus]
    startup_wait: str = ""


RunDisplay = Display[RunState]


class RunContent:
    """What a run shows. A log gets a line per step, one every LINE_INTERVAL seconds in a long step, and new errors."""

    def __init__(self) -> None:
        self._last_step, self._next_line_time, self._last_error_time = -1, 0.0, 0.0
        self._last_states: list[str] = []
        self._last_error_line = self._last_startup_wait = ""

    def format_lines(self, state: RunState) -> Iterator[str]:
        """Yield what is new since the last call."""
        status = state.status
        if status is None:
            yield from self._format_startup(state.processes)
            if state.startup_wait and state.startup_wait != self._last_startup_wait:
                yield state.startup_wait
            self._last_startup_wait = state.startup_wait
            return
        yield from self._format_new_errors(status.get("errors") or ())
        if status.get("step", 0) > self._last_step or time.monotonic() >= self._next_line_time:
            self._last_step, self._next_line_time = status.get("step", 0), time.monotonic() + LINE_INTERVAL
            yield format_status_line(status)

    def render_page(self, state: RunState) -> RenderableType:
        """Return the dashboard."""
        return render_dashboard(state.status, state.processes, state.startup_wait)

    def _format_startup(self, processes: Sequence[ProcessStatus]) -> Iterator[str]:
        states = [f"{process.name} {process.state.value}" for process in processes]
        if states != self._last_states and all(process.state is not ProcessState.ENDED for process in processes):
            yield ", ".join(states)
        self._last_states = states

    def _format_new_errors(self, errors: Sequence[Status]) -> Iterator[str]:
        """Yield new errors; consecutive identical errors are printed once."""
        for error in errors:
            line = f"{error['name']}: {error['message']}"
            if error["time"] > self._last_error_time and line != self._last_error_line:
                yield line
                self._last_error_line = line
            self._last_error_time = max(self._last_error_time, error["time"])


def format_status_line(status: Status) -> str:
    """Format a status as one line of `name=value` fields."""
    staleness: Mapping[str, Any] = status.get("staleness") or {}
    fields = {
        "step": f"{status.get('step', 0)}/{status.get('max_steps', '?')}",
        "state": status.get("state", "?"),
        _get_reward_label(status): _format_score(status.get("reward")),
        "rollouts_per_s": _format_number(status.get("rollouts_per_s"), ".1f"),
        "tokens_per_s": _format_number(status.get("tokens_per_s"), ".0f"),
        "staleness": _format_number(staleness.get("mean"), ".1f"),
        "trainable": _format_ratio(status.get("trainable")),
        "left": "unknown" if status.get("eta_s") is None else format_duration(status["eta_s"]),
    }
    evals = {name: _format_score(value) for name, value in _list_latest_eval_means(status)}
    counts: dict[str, int] = status.get("failures") or {}
    failures = {"failed": ",".join(f"{name}:{count}" for name, count in counts.items())} if counts else {}
    return " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in {**fields, **evals, **failures}.items())


def render_dashboard(
    status: Status | None, processes: Sequence[ProcessStatus], startup_wait: str = ""
) -> RenderableType:
    """Render the dashboard: progress, metrics, what each process waits for, and the last errors."""
    parts: list[RenderableType] = []
    if status is None:
        has_restarted = any(process.restarts for process in processes)
        parts.append(Text(startup_wait or ("waiting for the orchestrator" if has_restarted else "starting")))
    else:
        parts += [_build_header(status), Text(), _build_stats(status)]
    status = status or {}
    waits: dict[str, Any] = dict(status.get("processes") or {})
    rows = make_grid("process", "state", "pid", "restarts", "doing")
    for process in processes:
        name, state = process.name, process.state.value
        style = {"ready": "green", "starting": "yellow"}.get(state, "red" if process.restarts else "dim")
        wait, pid, restarts = str(waits.pop(name, "")), str(process.pid or ""), str(process.restarts or "")
        label = f"{name} on {process.node}" if process.node else name
        rows.add_row(Text(label), Text(state, style), pid, restarts, Text(wait, overflow="ellipsis"))
    for name, wait in waits.items():  # components of the orchestrator
        rows.add_row(Text(f"  {name}", "dim"), "", "", "", Text(str(wait), overflow="ellipsis"))
    parts += [Text(), rows]
    if errors := list(status.get("errors") or ())[-MAX_ERRORS:]:
        table = make_grid("last errors", "")
        for error in errors:
            table.add_row(Text(error["name"], "red"), Text(str(error["message"]).splitlines()[0], overflow="ellipsis"))
        parts += [Text(), table]
    return Group(*parts)


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


def _build_header(status: Status) -> Table:
    header = make_grid()
    step, steps = status.get("step", 0), status.get("max_steps") or 1
    time_left = "" if status.get("eta_s") is None else f"{format_duration(status['eta_s'])} left"
    bar = ProgressBar(total=steps, completed=min(step, steps), width=BAR_WIDTH)
    header.add_row(Text(str(status.get("run", "")), style="bold"), bar, f"step {step}/{steps}", time_left)
    return header


def _build_stats(status: Status) -> Table:
    stats = make_grid()
    history = [value for value in status.get("reward_history") or () if value is not None]
    reward = _format_score(status.get("reward"))
    stats.add_row(_get_reward_label(status), f"{reward}  {render_sparkline(history)}")
    for name, value in _list_latest_eval_means(status):
        stats.add_row(name, _format_score(value))
    stats.add_row("rollouts/s", _format_number(status.get("rollouts_per_s"), ".1f"))
    stats.add_row("tokens/s", _format_number(status.get("tokens_per_s"), ",.0f"))
    staleness: Mapping[str, Any] = status.get("staleness") or {}
    mean, maximum = _format_number(staleness.get("mean"), ".1f"), _format_number(staleness.get("max"), ".0f")
    stats.add_row("staleness", f"{mean} mean, {maximum} max")
    stats.add_row("trainable", _format_ratio(status.get("trainable")))
    groups: Mapping[str, int] = status.get("groups") or {}
    counts = ", ".join(f"{count} {state}" for state, count in groups.items() if count)
    stats.add_row("groups", counts or "none yet")
    stats.add_row("committed", f"step {status.get('committed', 0)}, {status.get('state', '?')}")
    return stats


def _get_reward_label(status: Status) -> str:
    """Return the name of the mean reward, which is that of a teacher if one samples all rollouts."""
    return "reward(teacher)" if status.get("is_teacher_reward") else "reward"


def _list_latest_eval_means(status: Status) -> list[tuple[str, float]]:
    """Return the latest mean reward of each eval, by name."""
    evals: dict[str, dict[str, Any]] = status.get("evals") or {}
    means = {name: metric.get("value") for name, metric in evals.items() if name.endswith("/avg")}
    return [(name.removesuffix("/avg"), value) for name, value in means.items() if value is not None]


def _format_number(value: Any, format_spec: str) -> str:
    return "none yet" if value is None else f"{value:{format_spec}}"


def _format_score(value: float | None) -> str:
    return "none yet" if value is None else format_score(value)


def _format_ratio(pair: Sequence[int] | None) -> str:
    return "none yet" if not pair else f"{pair[0]}/{pair[1]}"
