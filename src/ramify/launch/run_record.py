"""`run.json`: the status address and the processes of a run.

Only the supervisor writes it, and replaces the whole file each time, so a reader never sees a part of it. The file
remains when the run ends; whether the status address still answers has to be tried.
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ramify import __version__
from ramify.core.files import read_bytes, write_atomically
from ramify.launch.process import EarlierProcess
from ramify.run.fencing.token import FencingToken
from ramify.run.store import storage_call

if TYPE_CHECKING:
    from ramify.launch.supervisor import ProcessStatus

RECORD_FILE = "run.json"
EXITED_STATES = ("waiting", "ended")  # of processes that do not run


class RunRecord:
    """Writes the `run.json` of one run. `earlier_snapshot_time` is that of the last snapshot of the earlier start."""

    def __init__(self, path: Path, status_address: str, *, earlier_snapshot_time: float | None = None) -> None:
        self.file = path / RECORD_FILE
        self._header: dict[str, Any] = {
            "name": path.name,
            "status": status_address,
            "pid": os.getpid(),
            "started": time.time(),
            "earlier_snapshot_time": earlier_snapshot_time,
            "versions": {"ramify": __version__, "python": platform.python_version()},
        }

    def write(self, processes: "Sequence[ProcessStatus]") -> None:
        """Replace the file, with the current state of each process."""
        rows = {
            process.name: {**asdict(process), "state": process.state.value, "seconds": round(process.seconds, 1)}
            for process in processes
        }
        with storage_call(self.file):
            write_atomically(self.file, json.dumps({**self._header, "processes": rows}, indent=2))


def read_earlier_processes(path: Path) -> dict[str, EarlierProcess]:
    """Return the processes with a token that the last supervisor of a run has started, by name."""
    earlier: dict[str, EarlierProcess] = {}
    for name, row in read_record(path).get("processes", {}).items():
        if token := row.get("token"):
            replacement_delay = None if row["state"] in EXITED_STATES else row.get("replacement_delay")
            earlier[name] = EarlierProcess(FencingToken.parse(token), replacement_delay)
    return earlier


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of the file; an empty dict if there is none that can be read."""
    try:
        record = json.loads(read_bytes(path / RECORD_FILE))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], record) if isinstance(record, dict) else {}
