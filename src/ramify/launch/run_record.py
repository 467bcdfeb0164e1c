"""`run.json`: where a run that lives can be asked, and which processes it has.

Written by the supervisor alone, whole each time, so a reader sees one moment or another. A run that is over leaves it
behind; whether somebody still answers is found out by asking.
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify import __version__
from ramify.store import wrap_storage_errors

if TYPE_CHECKING:
    from ramify.launch.supervisor import ProcessStatus

RECORD_FILE = "run.json"


class RunRecord:
    """The file of one run."""

    def __init__(self, path: Path, status_address: str) -> None:
        self.file = path / RECORD_FILE
        self._header: dict[str, Any] = {
            "name": path.name,
            "status": status_address,
            "pid": os.getpid(),
            "started": time.time(),
            "versions": {"ramify": __version__, "python": platform.python_version()},
        }

    def write(self, processes: "Sequence[ProcessStatus]") -> None:
        """Say what each process is now."""
        rows = {
            one.name: {**asdict(one), "state": one.state.value, "seconds": round(one.seconds, 1)} for one in processes
        }
        part = self.file.with_name(f".{RECORD_FILE}.{os.getpid()}")
        with wrap_storage_errors(self.file):
            part.write_text(json.dumps({**self._header, "processes": rows}, indent=2), encoding="utf-8")
            part.replace(self.file)


def read_record(path: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none."""
    try:
        found = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
