"""How much of the machine is ours.

A container shows the cores and memory of its host, and a scheduler may pin us to fewer cores still. What counts is the
smallest of: the hardware, the affinity of this process, and the tightest control group between it and the root.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups leave of the machine; None where they do not limit."""

    cpus: float | None = None
    memory: int | None = None


def usable_cores(limit: Limits | None = None) -> int:
    """The cores this process may keep busy."""
    limit = limits() if limit is None else limit
    # macOS has no affinity
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed if limit.cpus is None else min(allowed, max(1, int(limit.cpus)))


def usable_memory(limit: Limits | None = None) -> int:
    """The bytes of memory this process may hold, with everything else in its control group."""
    limit = limits() if limit is None else limit
    total = psutil.virtual_memory().total
    return total if limit.memory is None else min(total, limit.memory)


def limits(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Limits:
    """The limits of the control groups this process is in, of either generation."""
    cpus: list[float] = []
    memory: list[int] = []
    for group in _groups(root, membership):
        quota, period = _words(group / "cpu.max") or ("max", "")
        if quota != "max":
            cpus.append(int(quota) / int(period))
        for word in _words(group / "memory.max") + _words(group / "memory.limit_in_bytes"):
            if word != "max":
                memory.append(int(word))
        first = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(first) == 2 and int(first[0]) > 0:
            cpus.append(int(first[0]) / int(first[1]))
    return Limits(min(cpus, default=None), min(memory, default=None))


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """Every control group from this process's own up to the root, in each hierarchy."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / controllers
        group = base / path.lstrip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(base))


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # no such controller here, or not ours to read: no limit known
