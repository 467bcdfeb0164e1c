"""When the processes of a run lived, seen from outside: by the kernel's start times and exit notices of all hosts.

The hosts of one machine have one clock, so the lives of two copies of a process can be compared. A copy begins when its
process was started, and ends when the process and all its descendants have exited.
"""

import os
import select
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.cluster.hosts import Hosts

SCAN_INTERVAL = 0.5  # seconds between two looks at all processes; exits are seen at once
SUPERVISOR = "supervisor"
ORCHESTRATOR = "orchestrator"
TRAINER = "trainer"
ROLES = {"rl": SUPERVISOR, "orchestrator": ORCHESTRATOR, "trainer": TRAINER, "serve": "engine", "env-server": "env"}


def read_clock() -> float:
    """Return the clock of start times of processes, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Copy:
    """One copy of a process; of a gang, one rank. `gang` is the token of the gang, empty for other processes."""

    role: str
    host: str
    pid: int
    started_at: float
    gang: str = ""
    ended_at: float | None = None
    live_pids: set[int] = field(default_factory=set)

    def is_same_gang(self, other: Self) -> bool:
        """Return whether both are ranks of one gang."""
        return bool(self.gang) and self.gang == other.gang


class ProcessMonitor:
    """Records the copies of all processes of a run on `hosts`, in a thread."""

    def __init__(self, hosts: Hosts) -> None:
        paths = {hosts[number].name: f"/run/netns/{hosts[number].namespace}" for number in range(len(hosts))}
        self._host_names = {Path(path).stat().st_ino: name for name, path in paths.items()}
        self.copies: list[Copy] = []
        self._seen: dict[tuple[int, float], Copy | None] = {}  # by pid and start time
        self._pidfds: dict[int, tuple[int, Copy]] = {}
        self._poller = select.poll()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join(60)

    def list_live(self, host_name: str) -> list[str]:
        """Return the roles that have a process on a host now."""
        return sorted({copy.role for copy in self.copies if copy.host == host_name and copy.ended_at is None})

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            self._scan()
            deadline = time.monotonic() + SCAN_INTERVAL
            while (seconds := deadline - time.monotonic()) > 0:
                for pidfd, _ in self._poller.poll(seconds * 1000):
                    self._record_exit(pidfd)

    def _scan(self) -> None:
        """Look for new processes: commands of a run, and descendants of these."""
        processes = {pid: stat for pid in _list_pids() if (stat := _read_stat(pid)) is not None}
        self._seen = {key: copy for key, copy in self._seen.items() if processes.get(key[0], (0, 0.0))[1] == key[1]}
        for pid in sorted(processes, key=lambda pid: processes[pid][1]):
            parent, started_at = processes[pid]
            if self._seen.get((pid, started_at)) is not None:
                continue
            copy = self._read_copy(pid, started_at)
            if copy is not None:
                self.copies.append(copy)
            elif parent in processes:
                copy = self._seen.get((parent, processes[parent][1]))
                copy = None if copy is not None and copy.role == SUPERVISOR else copy  # its children have their own
            self._seen[pid, started_at] = copy
            if copy is not None:
                self._watch(pid, copy)

    def _read_copy(self, pid: int, started_at: float) -> Copy | None:
        """Return the copy whose first process this is; None if it is another process."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[1:3] != ["-m", "ramify"] or words[3] not in ROLES:
                return None
            host = self._host_names.get(Path(f"/proc/{pid}/ns/net").stat().st_ino)
            variables = dict(
                entry.partition("=")[::2]
                for entry in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            )
            role = ROLES[words[3]]
            if role == "env":
                role = f"env/{tomllib.loads(Path(words[5]).read_text())['source']}"
        except (OSError, IndexError):
            return None  # it has exited
        return None if host is None else Copy(role, host, pid, started_at, variables.get("RAMIFY_GANG_TOKEN", ""))

    def _watch(self, pid: int, copy: Copy) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end_if_empty(copy)
            return
        copy.live_pids.add(pid)
        copy.ended_at = None
        self._pidfds[pidfd] = (pid, copy)
        self._poller.register(pidfd, select.POLLIN)

    def _record_exit(self, pidfd: int) -> None:
        pid, copy = self._pidfds.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        copy.live_pids.discard(pid)
        self._end_if_empty(copy)

    def _end_if_empty(self, copy: Copy) -> None:
        if not copy.live_pids:
            copy.ended_at = read_clock()


def compute_overlaps(copies: Iterable[Copy], *, now: float) -> Iterator[tuple[Copy, Copy, float]]:
    """Yield each copy, the older copy of its role that lived longest beside it, and for how many seconds it did.

    Only copies that replace an older one are yielded; the seconds are negative if the older one had ended before.
    """
    by_role: dict[str, list[Copy]] = {}
    for copy in sorted(copies, key=lambda copy: copy.started_at):
        older = [other for other in by_role.setdefault(copy.role, []) if not other.is_same_gang(copy)]
        if older:
            last = max(older, key=lambda other: _get_end(other, now))
            yield copy, last, min(_get_end(last, now), _get_end(copy, now)) - copy.started_at
        by_role[copy.role].append(copy)


def _get_end(copy: Copy, now: float) -> float:
    return now if copy.ended_at is None else copy.ended_at


def _list_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read_stat(pid: int) -> tuple[int, float] | None:
    """Return the parent and the start time of a process; None if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]) / os.sysconf("SC_CLK_TCK"))
