"""Describes the last known state of a run in one line, for when its orchestrator does not answer (yet)."""

from functools import partial
from pathlib import Path

from ramify.core.async_calls import call_storage
from ramify.orchestrate.snapshot import SNAPSHOT_FILE, Snapshot, read_snapshot


def describe_last_state(path: Path) -> str:
    """Describe the last snapshot of the run at `path`, and its age."""
    from ramify.launch.dashboard import format_status_line  # imports rich

    snapshot = read_snapshot(path)
    if snapshot is None:
        return f"{path} has no status.json; its last state is unknown"
    return f"last state, {snapshot.age:.0f} s ago: {format_status_line(snapshot.status)}"


async def read_startup_wait(path: Path, earlier: Snapshot | None) -> str:
    """Describe what the orchestrator of the run at `path` waits for while it starts; "" if it has reported no wait.

    `earlier` is the last snapshot of the earlier start. Its time is not compared with that of this start, because it
    may be from another machine.
    """
    snapshot = await call_storage(partial(read_snapshot, path), SNAPSHOT_FILE)
    if snapshot is None or snapshot == earlier or not snapshot.is_starting:
        return ""
    for wait in snapshot.waits:
        if wait["since_s"]:
            limit = "" if wait["deadline_s"] is None else f", up to {wait['deadline_s']:g} s"
            return f"the orchestrator waits for {wait['waits_for']}{limit}"
    return ""
