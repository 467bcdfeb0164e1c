"""What a run says of itself: asked at its status address while it lives, read from its files afterwards."""

import fnmatch
from pathlib import Path

from ramify.errors import ConfigInvalid, ProviderError
from ramify.launch.run_record import read_record
from ramify.launch.status_client import StatusClient
from ramify.store import RunStore
from ramify.store.run_log import MetricPoint, RunLog


def connect_if_running(path: Path) -> StatusClient | None:
    """The way to ask the run; None where nobody answers, or another run does at the same address."""
    record = read_record(path)
    if not record.get("status"):
        return None
    client = StatusClient(record["status"])
    try:
        answered = client.get("/status")
    except ProviderError:
        return None
    same = isinstance(answered, dict) and Path(str(answered.get("run"))).name == path.resolve().name
    return client if same else None


def has_finished(store: RunStore) -> bool:
    """Whether the run reached its last step when it ran last."""
    ends = [event.kind for event in RunLog(store).events() if event.kind in ("started", "finished", "left")]
    return ends[-1:] == ["finished"]


def read_metrics(path: Path, pattern: str = "*") -> list[MetricPoint]:
    """The metrics whose names match, by step and name."""
    client = connect_if_running(path)
    if client is not None:
        found = [
            MetricPoint(int(row["step"]), str(row["name"]), float(row["value"]))
            for row in client.get("/metrics", name=pattern)
        ]
        return sorted(point for point in found if fnmatch.fnmatchcase(point.name, pattern))
    with RunStore.open(path, write=False) as store:
        if not store.select("SELECT 1 FROM sqlite_master WHERE name = 'metrics'"):
            raise ConfigInvalid(f"{path} has no metrics: it never trained")
        return [point for point in RunLog(store).metrics() if fnmatch.fnmatchcase(point.name, pattern)]
