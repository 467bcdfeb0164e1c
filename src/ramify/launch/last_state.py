"""Describes the last known state of a run in one line, for when its orchestrator does not answer (yet)."""

from pathlib import Path

from ramify.orchestrate.snapshot import read_snapshot


def describe_last_state(path: Path) -> str:
    """Describe the last snapshot of the run at `path`, and its age."""
    from ramify.launch.dashboard import format_status_line  # imports rich

    snapshot = read_snapshot(path)
    if snapshot is None:
        return f"{path} has no status.json; its last state is unknown"
    return f"last state, {snapshot.age:.0f} s ago: {format_status_line(snapshot.status)}"


def describe_startup_wait(path: Path, started_at: float) -> str:
    """Describe what the orchestrator of the run at `path` waits for while it starts; "" if it has reported no wait.

    `started_at` is in Unix seconds: an older snapshot is that of an earlier start.
    """
    snapshot = read_snapshot(path)
    if snapshot is None or snapshot.time < started_at or snapshot.status.get("state") != "starting":
        return ""
    for wait in snapshot.waits:
        if wait["since_s"]:
            limit = "" if wait["deadline_s"] is None else f", up to {wait['deadline_s']:g} s"
            return f"the orchestrator waits for {wait['waits_for']}{limit}"
    return ""
