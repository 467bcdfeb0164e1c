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
class CgroupLimits:
    """What control groups leave of the machine; None where they do not limit."""

    cpus: float | None = None
    memory: int | None = None


def usable_cores(limits: CgroupLimits | None = None) -> int:
    """The cores this process may keep busy."""
    limits = read_cgroup_limits() if limits is None else limits
    # macOS has no affinity
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed if limits.cpus is None else min(allowed, max(1, int(limits.cpus)))


def usable_memory(limits: CgroupLimits | None = None) -> int:
    """The bytes of memory this process may hold, with everything else in its control group."""
    limits = read_cgroup_limits() if limits is None else limits
    total = psutil.virtual_memory().total
    return total if limits.memory is None else min(total, limits.memory)


def read_cgroup_limits(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> CgroupLimits:
    """The limits of the control groups this process is in, of either generation."""
    cpus: list[float] = []
    memory: list[int] = []
    for group in _iter_cgroups(cgroup_root, membership):
        quota, period = _read_words(group / "cpu.max") or ("max", "")
        if quota != "max":
            cpus.append(int(quota) / int(period))
        for word in _read_words(group / "memory.max") + _read_words(group / "memory.limit_in_bytes"):
            if word != "max":
                memory.append(int(word))
        first = _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
        if len(first) == 2 and int(first[0]) > 0:
            cpus.append(int(first[0]) / int(first[1]))
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


def _iter_cgroups(cgroup_root: Path, membership: Path) -> Iterator[Path]:
    """Every control group from this process's own up to the root, in each hierarchy."""
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        base = cgroup_root / controllers
        group = base / path.lstrip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(base))


def _read_words(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # no such controller here, or not ours to read: no limit known
