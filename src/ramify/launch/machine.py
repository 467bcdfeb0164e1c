"""The cores and the memory that this process may use.

A container shows the cores and memory of its host, and a scheduler may pin a process to fewer cores. So the result is
the minimum of the hardware, the affinity of this process, and all its control groups up to the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ramify.rollout.envserver.config import count_available_cores


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits of control groups: number of CPUs and bytes of memory; None without a limit."""

    cpus: float | None = None
    memory: int | None = None


def count_usable_cores(limits: CgroupLimits | None = None) -> int:
    """Return the number of cores that this process may use."""
    limits = read_cgroup_limits() if limits is None else limits
    allowed = count_available_cores()
    return allowed if limits.cpus is None else min(allowed, max(1, int(limits.cpus)))


def get_usable_memory(limits: CgroupLimits | None = None) -> int:
    """Return the bytes of memory that this process and the others of its control group may use."""
    limits = read_cgroup_limits() if limits is None else limits
    total = psutil.virtual_memory().total
    return total if limits.memory is None else min(total, limits.memory)


def read_cgroup_limits(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> CgroupLimits:
    """Return the tightest limits of the control groups of this process, v1 or v2."""
    cpus: list[float] = []
    memory: list[int] = []
    for group in _iter_cgroups(cgroup_root, membership):
        quota, period = _read_words(group / "cpu.max") or ("max", "")
        if quota != "max":
            cpus.append(int(quota) / int(period))
        for word in _read_words(group / "memory.max") + _read_words(group / "memory.limit_in_bytes"):
            if word != "max":
                memory.append(int(word))
        v1_cpu = _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
        if len(v1_cpu) == 2 and int(v1_cpu[0]) > 0:
            cpus.append(int(v1_cpu[0]) / int(v1_cpu[1]))
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


def _iter_cgroups(cgroup_root: Path, membership: Path) -> Iterator[Path]:
    """Yield the control groups of this process and their ancestors, in each hierarchy."""
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        base = cgroup_root / controllers
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _read_words(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # the controller does not exist or is not readable: no known limit
