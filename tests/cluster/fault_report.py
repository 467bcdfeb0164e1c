"""What a fault did to a run, and the table of all faults."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.cluster.process_monitor import ORCHESTRATOR, SUPERVISOR, Copy
from tests.cluster.run_events import RunEvents

COLUMNS = (
    "",
    "fault",
    "processes hit",
    "noticed",
    "command repeated",
    "next step",
    "steps again",
    "old copies lived on",
    "overlap",
)
HEAD_ROLES = (SUPERVISOR, ORCHESTRATOR)  # they have no lease


@dataclass(slots=True)
class FaultReport:
    """What a fault did; `started_at` is by the clock of processes, other times are seconds after it."""

    fault: str
    roles: list[str]
    """The roles of the processes on the host that it hit."""
    started_at: float
    noticed: float | None = None
    """Until the supervisor reported a node that does not answer; None if it did not, or was itself hit."""
    repeated: float | None = None
    """Until the command was repeated; None if it ran on."""
    resumed: float | None = None
    """Until the next step was trained."""
    num_repeated_steps: int = 0
    """Steps that were trained again, because they were not committed."""
    overlaps: dict[str, float] = field(default_factory=dict)
    """For each role of which another copy was started, how long two copies lived; negative: the time between them."""
    lived_on: float | None = None
    """Until the last leased process that was replaced had ended; None if none was replaced."""

    @property
    def overlap(self) -> float | None:
        """The longest overlap of two copies of a leased process; None if none was replaced."""
        return max((seconds for role, seconds in self.overlaps.items() if role not in HEAD_ROLES), default=None)

    def record_events(self, events: RunEvents, after: float) -> None:
        """Record what the logs say; a line that arrived before `after` may be older than the fault."""
        step_at, noticed_at = events.find_step(after), events.find_notice(self.started_at)
        self.resumed = None if step_at is None else step_at - self.started_at
        self.noticed = None if noticed_at is None or self.repeated is not None else noticed_at - self.started_at
        self.num_repeated_steps = events.count_repeated_steps(after)

    def record_overlaps(self, overlaps: Iterable[tuple[Copy, Copy, float]]) -> None:
        """Record how long the copies that were started since the fault lived beside those before them."""
        for copy, older, seconds in overlaps:
            if copy.started_at < self.started_at:
                continue
            if copy.role not in HEAD_ROLES and older.ended_at is not None:
                self.lived_on = max(self.lived_on or 0.0, older.ended_at - self.started_at)
            self.overlaps[copy.role] = max(seconds, self.overlaps.get(copy.role, seconds))

    def list_problems(self) -> list[str]:
        """Return a line if two copies of a leased process overlapped, after whichever fault."""
        if self.overlap is None or self.overlap <= 0.0:
            return []
        return [f"{self.fault}: two copies lived for {self.overlap:.1f} s"]


def format_table(reports: Sequence[FaultReport]) -> str:
    """Return the table in Markdown."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for number, report in enumerate(reports, 1):
        cells = [
            str(number),
            report.fault,
            ", ".join(dict.fromkeys("env servers" if role.startswith("env/") else role for role in report.roles)),
            _format_seconds(report.noticed),
            _format_seconds(report.repeated),
            _format_seconds(report.resumed),
            str(report.num_repeated_steps),
            "–" if report.lived_on is None else f"{report.lived_on:.1f} s",
            ", ".join([_format_overlap(report.overlap), *_format_head_overlaps(report)]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f} s"


def _format_head_overlaps(report: FaultReport) -> list[str]:
    return [f"{role} {report.overlaps[role]:.1f} s" for role in HEAD_ROLES if report.overlaps.get(role, 0.0) > 0]


def _format_overlap(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds > 0 else f"none ({-seconds:.1f} s between)"
