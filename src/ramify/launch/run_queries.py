"""Queries about a run: sent to its status address while it is running, read from its files afterwards."""

import fnmatch
from pathlib import Path
from typing import Any, cast

from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.launch.run_record import read_record
from ramify.launch.status_client import DEFAULT_TIMEOUT, StatusClient
from ramify.rollout.evals.stats import format_score
from ramify.run.store import RunStore
from ramify.run.store.run_log import MetricPoint, RunLog

INTERRUPTED_EVENT = "interrupted"  # event of a run that was ended by Ctrl-C


def connect_if_running(path: Path) -> StatusClient | None:
    """Return a client of the run's status address; None if nothing answers there, or another run does."""
    answer = query_status(path)
    return None if answer is None else answer[0]


def query_status(path: Path, *, timeout: float = DEFAULT_TIMEOUT) -> tuple[StatusClient, dict[str, Any]] | None:
    """Return a client of the run's status address, and its status; None if the run does not answer there."""
    record = read_record(path)
    if not record.get("status"):
        return None
    client = StatusClient(record["status"], timeout=timeout)
    try:
        reply = client.get("/status")
    except ProviderError:
        return None
    if not isinstance(reply, dict):
        return None
    status = cast(dict[str, Any], reply)
    return (client, status) if Path(str(status.get("run"))).name == path.resolve().name else None


def has_finished(store: RunStore) -> bool:
    """Return whether the run reached its last step when it ran last, and was not rolled back since."""
    return describe_end(store) == "finished"


def describe_end(store: RunStore) -> str:
    """Return how a run that does not run now ended: `finished`, `interrupted`, `stopped` or `rolled back to step N`."""
    lifecycle_kinds = ("started", "finished", INTERRUPTED_EVENT, "stopped", "rolled_back")
    events = [event for event in RunLog(store).events() if event.kind in lifecycle_kinds]
    if not events:
        return "stopped"
    last = events[-1]
    if last.kind == "rolled_back":
        return f"rolled back to step {last.fields['step']}"
    return last.kind if last.kind in ("finished", INTERRUPTED_EVENT) else "stopped"


def describe_evals(path: Path) -> list[str]:
    """Return, for each eval of a run that does not run now, a line with its first and its last mean reward."""
    with RunStore.open(path, write=False) as store:
        points = RunLog(store).metrics("eval/*/avg")
    points_by_name: dict[str, list[MetricPoint]] = {}
    for point in points:
        points_by_name.setdefault(point.name.removesuffix("/avg"), []).append(point)
    lines: list[str] = []
    for name, (first, *others) in points_by_name.items():
        changes = [f" -> {format_score(others[-1].value)} at step {others[-1].step}"] if others else []
        lines.append("".join([f"{name}: {format_score(first.value)} at step {first.step}", *changes]))
    return lines


def read_metrics(path: Path, pattern: str = "*") -> list[MetricPoint]:
    """Return the metrics whose names match, by step and name."""
    client = connect_if_running(path)
    if client is not None:
        points = [
            MetricPoint(int(row["step"]), str(row["name"]), float(row["value"]))
            for row in client.get("/metrics", name=pattern)
        ]
        return sorted(point for point in points if fnmatch.fnmatchcase(point.name, pattern))
    with RunStore.open(path, write=False) as store:
        if not store.select("SELECT 1 FROM sqlite_master WHERE name = 'metrics'"):
            raise ConfigInvalid(f"{path} has no metrics; no training step was recorded")
        return [point for point in RunLog(store).metrics() if fnmatch.fnmatchcase(point.name, pattern)]
