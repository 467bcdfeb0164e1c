"""`status.json`: the last known state of a run, for when its orchestrator does not answer.

The orchestrator replaces the file every few seconds. A process that is stopped or hangs does not answer HTTP requests,
and it holds the run's lock, so no other process can open the database. This file can be read without either.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ramify.core.files import read_bytes, write_atomically

SNAPSHOT_FILE = "status.json"


class OrchestratorState(StrEnum):
    """What the orchestrator of a run does: STARTING -> RUNNING -> EVALUATING -> FINISHED; LEAVING once it has to stop.

    `docs/scaling.md` explains the states to users.
    """

    STARTING = "starting"
    RUNNING = "running"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `/status`, `/why` and `/dropped` would have answered at Unix seconds `time`.

    `dropped` may be limited to the groups that were dropped last.
    """

    time: float
    host: str
    pid: int
    status: dict[str, Any]
    waits: list[dict[str, Any]]
    dropped: str = ""

    @property
    def age(self) -> float:
        """Seconds since it was written."""
        return max(0.0, time.time() - self.time)

    @property
    def is_starting(self) -> bool:
        """Whether the orchestrator was starting."""
        return self.status.get("state") == OrchestratorState.STARTING


def write_snapshot(path: Path, status: dict[str, Any], waits: Sequence[dict[str, Any]] = (), dropped: str = "") -> None:
    """Replace the snapshot of the run at `path`. If the disk cannot be written, the old snapshot stays."""
    save_snapshot(path, encode_snapshot(status, waits, dropped))


def encode_snapshot(status: dict[str, Any], waits: Sequence[dict[str, Any]] = (), dropped: str = "") -> str:
    """Return a snapshot of this moment as JSON."""
    return json.dumps(asdict(Snapshot(time.time(), platform.node(), os.getpid(), status, list(waits), dropped)))


def save_snapshot(path: Path, text: str) -> None:
    """Replace the snapshot of the run at `path` by an encoded one, as `write_snapshot` does."""
    with contextlib.suppress(OSError):  # a full disk is reported by the store, not here
        write_atomically(path / SNAPSHOT_FILE, text)


def read_snapshot(path: Path) -> Snapshot | None:
    """Return the last snapshot of the run at `path`; None if there is none that can be read."""
    try:
        return msgspec.convert(json.loads(read_bytes(path / SNAPSHOT_FILE)), Snapshot)
    except (OSError, ValueError, msgspec.ValidationError):
        return None
