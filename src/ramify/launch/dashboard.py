"""How a run shows itself while it lives: a page in a terminal, lines everywhere else.

Both read the same two things, what the orchestrator says of the run (the answer to `/status`) and what the supervisor
sees of the processes. Either may be missing: a run that is starting has no orchestrator yet.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ramify.durations import format_duration
from ramify.launch.process import ProcessState
from ramify.launch.supervisor import ProcessStatus

REFRESH_INTERVAL = 0.5  # seconds between two looks
LINE_INTERVAL = 10.0  # seconds between two lines that say the same step
MAX_ERRORS = 5  # the last so many are shown
SPARKLINE_CHARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 40  # of the bar and of the curve

Status = dict[str, Any]


class RunDisplay(Protocol):
    """A front end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Something worth a line of its own."""
        ...

    def refresh(self, status: Status | None, processes: Sequence[ProcessStatus]) -> None:
        """The run now; None where the orchestrator does not answer."""
        ...


def choose_display() -> RunDisplay:
    """The page where there is a terminal to draw it on, lines where there is none."""
    return LiveRunDisplay() if sys.stdout.isatty() else LogRunDisplay()


class NullRunDisplay:
    """Shows nothing: for programs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None: ...

    def refresh(self, status: Status | None, processes: Sequence[ProcessStatus]) -> None: ...


class LogRunDisplay(NullRunDisplay):
    """One line for each step, one every few seconds where a step takes long, and one for each new error."""

    def __init__(self) -> None:
        self._last_step, self._next_line_time, self._last_error_time = -1, 0.0, 0.0
        self._last_states: list[str] = []
        self._last_error_line = ""

    def print_line(self, line: str) -> None:
        print(line, flush=True)

    def refresh(self, status: Status | None, processes: Sequence[ProcessStatus]) -> None:
        if status is None:
            self._print_startup(processes)
            return
        self._print_new_errors(status.get("errors") or ())
        if status.get("step", 0) > self._last_step or time.monotonic() >= self._next_line_time:
            self._last_step, self._next_line_time = status.get("step", 0), time.monotonic() + LINE_INTERVAL
            self.print_line(format_status_line(status))

    def _print_startup(self, processes: Sequence[ProcessStatus]) -> None:
        states = [f"{one.name} {one.state.value}" for one in processes]
        if states != self._last_states and all(one.state is not ProcessState.ENDED for one in processes):
            self.print_line(", ".join(states))
        self._last_states = states

    def _print_new_errors(self, errors: Sequence[Status]) -> None:
        """Those that are new; what happened to many at once is said once."""
        for error in errors:
            line = f"{error['name']}: {error['message']}"
            if error["time"] > self._last_error_time and line != self._last_error_line:
                self.print_line(line)
                self._last_error_line = line
            self._last_error_time = max(self._last_error_time, error["time"])


class LiveRunDisplay(NullRunDisplay):
    """A page that is drawn anew twice a second."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(console=console or Console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_line(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def refresh(self, status: Status | None, processes: Sequence[ProcessStatus]) -> None:
        self._live.update(render_dashboard(status, processes), refresh=True)


def format_status_line(status: Status) -> str:
    """The run in one line of fields."""
    fields = {
        "step": f"{status.get('step', 0)}/{status.get('max_steps', '?')}",
        "state": status.get("state", "?"),
        "reward": _format_number(status.get("reward"), ".3f"),
        "rollouts_per_s": _format_number(status.get("rollouts_per_s"), ".1f"),
        "tokens_per_s": _format_number(status.get("tokens_per_s"), ".0f"),
        "staleness": _format_number((status.get("staleness") or {}).get("mean"), ".1f"),
        "trainable": _format_ratio(status.get("trainable")),
        "left": "unknown" if status.get("eta_s") is None else format_duration(status["eta_s"]),
    }
    evals = {name: _format_number(value, ".3f") for name, value in _latest_eval_means(status)}
    counts: dict[str, int] = status.get("failures") or {}
    failed = {"failed": ",".join(f"{name}:{count}" for name, count in counts.items())} if counts else {}
    return " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in {**fields, **evals, **failed}.items())


def render_dashboard(status: Status | None, processes: Sequence[ProcessStatus]) -> RenderableType:
    """The run as a page: progress, figures, what each process does, the last errors."""
    said = status or {}
    parts: list[RenderableType] = []
    if status is None:
        parts.append(Text("starting" if not any(one.restarts for one in processes) else "waiting for the orchestrator"))
    else:
        parts += [_build_header(status), Text(), _build_stats(status)]
    told: dict[str, Any] = dict(said.get("processes") or {})
    rows = _make_grid("process", "state", "pid", "restarts", "doing")
    for one in processes:
        style = {"ready": "green", "starting": "yellow"}.get(one.state.value, "red" if one.restarts else "dim")
        doing = str(told.pop(one.name, ""))
        pid, restarts = str(one.pid or ""), str(one.restarts or "")
        rows.add_row(Text(one.name), Text(one.state.value, style), pid, restarts, Text(doing, overflow="ellipsis"))
    for name, doing in told.items():  # parts of the orchestrator
        rows.add_row(Text(f"  {name}", "dim"), "", "", "", Text(str(doing), overflow="ellipsis"))
    parts += [Text(), rows]
    if errors := list(said.get("errors") or ())[-MAX_ERRORS:]:
        table = _make_grid("last errors", "")
        for error in errors:
            table.add_row(Text(error["name"], "red"), Text(str(error["message"]).splitlines()[0], overflow="ellipsis"))
        parts += [Text(), table]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = BAR_WIDTH) -> str:
    """A curve in one line: the values, averaged into `width` places, between their own extremes."""
    if not values:
        return ""
    count = min(width, len(values))
    places = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    means = [sum(place) / len(place) for place in places]
    low, high = min(means), max(means)
    scale = (len(SPARKLINE_CHARS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKLINE_CHARS[round((mean - low) * scale)] for mean in means)


def _build_header(status: Status) -> Table:
    head = Table.grid(padding=(0, 2, 0, 0))
    step, steps = status.get("step", 0), status.get("max_steps") or 1
    left = "" if status.get("eta_s") is None else f"{format_duration(status['eta_s'])} left"
    bar = ProgressBar(total=steps, completed=min(step, steps), width=BAR_WIDTH)
    head.add_row(Text(str(status.get("run", "")), style="bold"), bar, f"step {step}/{steps}", left)
    return head


def _build_stats(status: Status) -> Table:
    figures = _make_grid()
    history = [value for value in status.get("reward_history") or () if value is not None]
    figures.add_row("reward", f"{_format_number(status.get('reward'), '.3f')}  {sparkline(history)}")
    for name, value in _latest_eval_means(status):
        figures.add_row(name, _format_number(value, ".3f"))
    figures.add_row("rollouts/s", _format_number(status.get("rollouts_per_s"), ".1f"))
    figures.add_row("tokens/s", _format_number(status.get("tokens_per_s"), ",.0f"))
    stale = status.get("staleness") or {}
    figures.add_row(
        "staleness", f"{_format_number(stale.get('mean'), '.1f')} mean, {_format_number(stale.get('max'), '.0f')} max"
    )
    figures.add_row("trainable", _format_ratio(status.get("trainable")))
    groups = ", ".join(f"{count} {state}" for state, count in (status.get("groups") or {}).items() if count)
    figures.add_row("groups", groups or "none yet")
    figures.add_row("committed", f"step {status.get('committed', 0)}, {status.get('state', '?')}")
    return figures


def _latest_eval_means(status: Status) -> list[tuple[str, float]]:
    """The newest mean of each eval."""
    found = status.get("evals") or {}
    means = {name: told.get("value") for name, told in found.items() if name.endswith("/avg")}
    return [(name.removesuffix("/avg"), value) for name, value in means.items() if value is not None]


def _format_number(value: Any, format_spec: str) -> str:
    return "none yet" if value is None else f"{value:{format_spec}}"


def _format_ratio(pair: Sequence[int] | None) -> str:
    return "none yet" if not pair else f"{pair[0]}/{pair[1]}"


def _make_grid(*titles: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if titles:
        table.add_row(*(Text(title, style="dim") for title in titles))
    return table
