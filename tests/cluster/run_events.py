"""When the logs of a run said what. Lines of trainers have no time, so they get the time at which they arrived here."""

import re
import threading
from pathlib import Path
from typing import Self

from tests.cluster.process_monitor import read_clock

STEP = re.compile(r"step=(\d+) loss=")
COMMIT = re.compile(r"checkpoint=(\d+) seconds=")
NOTICE = re.compile(r"does not answer|is lost")
LOGS = ("trainer", "launch")
POLL_INTERVAL = 0.1  # seconds


class RunEvents:
    """Follows the logs of a run, whose directory may change, in a thread.

    Attributes:
        steps: time and number of each step that was trained.
        commits: time and version of each commit that was acknowledged.
        notices: time and text of each message of the supervisor about a node that does not answer or is lost.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.commits: list[tuple[float, int]] = []
        self.notices: list[tuple[float, str]] = []
        self._files: dict[Path, tuple[int, str]] = {}  # inode and the text that was read
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._is_stopped.wait(POLL_INTERVAL):
            self.poll()

    def follow(self, run: Path) -> None:
        """Follow the logs in this run directory, and no others. What they say already is not new."""
        self.poll()
        with self._lock:
            self._files = {path: _read_complete_lines(path) for path in (run / "logs" / f"{name}.log" for name in LOGS)}

    def poll(self) -> None:
        """Read the new lines."""
        with self._lock:
            self._read_lines(read_clock())

    def _read_lines(self, now: float) -> None:
        for path, (inode, text) in list(self._files.items()):
            new_inode, new_text = self._files[path] = _read_complete_lines(path)
            for line in new_text[len(text) if new_inode == inode else 0 :].splitlines():
                self._record(now, line)

    def _record(self, now: float, line: str) -> None:
        if match := STEP.match(line):
            self.steps.append((now, int(match[1])))
        elif match := COMMIT.match(line):
            self.commits.append((now, int(match[1])))
        elif NOTICE.search(line):
            self.notices.append((now, line))

    def find_step(self, after: float) -> float | None:
        """Return when the first step after a time was trained; None if there is none yet."""
        return next((at for at, _ in self.steps if at > after), None)

    def find_commit(self, after: float) -> float | None:
        """Return when the first commit after a time was acknowledged; None if there is none yet."""
        return next((at for at, _ in self.commits if at > after), None)

    def find_notice(self, after: float) -> float | None:
        """Return when the supervisor first noticed something after a time; None if it did not."""
        return next((at for at, _ in self.notices if at > after), None)

    def count_repeated_steps(self, after: float) -> int:
        """Return how many steps were trained after a time that had been trained before it."""
        last = max((step for at, step in self.steps if at <= after), default=-1)
        return sum(at > after and step <= last for at, step in self.steps)


def _read_complete_lines(path: Path) -> tuple[int, str]:
    """Return the inode of a file and its complete lines; 0 and no text if there is none."""
    try:
        inode, text = path.stat().st_ino, path.read_text(errors="replace")
    except FileNotFoundError:
        return 0, ""
    return inode, text[: text.rfind("\n") + 1]
