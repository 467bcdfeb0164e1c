"""Describes the last known state of a run in one line, for when its orchestrator does not answer."""

from pathlib import Path

from ramify.orchestrate.snapshot import read_snapshot


def describe_last_state(path: Path) -> str:
    """Describe the last snapshot of the run at `path`, and its age."""
    from ramify.launch.dashboard import format_status_line  # imports rich

    snapshot = read_snapshot(path)
    if snapshot is None:
        return f"{path} has no status.json; its last state is unknown"
    return f"last state, {snapshot.age:.0f} s ago: {format_status_line(snapshot.status)}"
