"""Control groups: limits on the memory, processes and cores of all programs of a rollout together.

Linux has two versions of control groups, and a machine may have both at once: with the first, each controller has a
hierarchy of its own. Whether a process may create groups depends on the machine, so it is tried once. The name of a
group holds the process that made it, so that the groups of a process that was killed can be found and removed.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ramify.env.runtime import Capability, ResourceLimits
from ramify.errors import SandboxError
from ramify.runtime.owner import is_owner_alive, make_owner_name

MOUNTS_FILE = Path("/proc/self/mountinfo")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")
GROUP_PREFIX = "ramify-"
REMOVE_TIMEOUT = 5.0  # seconds for the processes of a group to be gone after they were killed
REMOVE_INTERVAL = 0.005
CPU_PERIOD = 100_000  # microseconds
CONTROLLER_OF_CAPABILITY = {
    Capability.MEMORY_LIMIT: "memory",
    Capability.PROCESS_LIMIT: "pids",
    Capability.CPU_LIMIT: "cpu",
}

JOIN_SCRIPT = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupParents:
    """The directories in which this process may create groups, by controller, and why it may not for the others."""

    directories: Mapping[str, Path]
    reasons: Mapping[str, str]


@cache
def find_cgroup_parents() -> CgroupParents:
    """Return where groups can be created. Creates and removes a group in each place; the result is cached."""
    directories: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    places = dict(_iter_parent_directories())
    for controller in CONTROLLER_OF_CAPABILITY.values():
        if controller not in places:
            reasons[controller] = f"this machine has no control groups for {controller}"
        elif reason := _find_creation_problem(places[controller], controller):
            reasons[controller] = reason
        else:
            directories[controller] = places[controller]
    return CgroupParents(directories, reasons)


def find_limit_capabilities() -> tuple[frozenset[Capability], dict[Capability, str]]:
    """Return the limits that groups can enforce here, and why they cannot enforce the others."""
    parents = find_cgroup_parents()
    available = {name for name, controller in CONTROLLER_OF_CAPABILITY.items() if controller in parents.directories}
    reasons = {
        name: parents.reasons[controller]
        for name, controller in CONTROLLER_OF_CAPABILITY.items()
        if controller in parents.reasons
    }
    return frozenset(available), reasons


class Cgroup:
    """The groups of one rollout, one for each controller that a limit needs."""

    def __init__(self, parents: CgroupParents | None = None) -> None:
        """Create the groups. Raises SandboxError if that fails."""
        name = GROUP_PREFIX + make_owner_name(next(_numbers))
        self._directories = {
            controller: parent / name for controller, parent in (parents or find_cgroup_parents()).directories.items()
        }
        try:
            for directory in self._unique_directories:
                directory.mkdir()
        except OSError as error:
            self.remove()
            raise SandboxError(f"cannot create a control group: {error}") from error

    @property
    def _unique_directories(self) -> list[Path]:
        return list(dict.fromkeys(self._directories.values()))

    def build_join_command(self, argv: Sequence[str]) -> list[str]:
        """Return a command line that joins the groups and then becomes the program of `argv`."""
        files = [str(directory / "cgroup.procs") for directory in self._unique_directories]
        return ["/bin/sh", "-c", JOIN_SCRIPT, "sh", *files, "--", *argv]

    def set_limits(self, limits: ResourceLimits) -> None:
        """Apply limits. Raises SandboxError if the kernel refuses one."""
        try:
            for controller, directory in self._directories.items():
                for file, value in _iter_settings(controller, limits):
                    if (directory / file).exists():  # the two versions have different files
                        (directory / file).write_text(value)
        except OSError as error:
            raise SandboxError(f"cannot limit resources: {error}") from error

    def num_oom_kills(self) -> int:
        """Return how many processes of the group the kernel killed because of the memory limit."""
        directory = self._directories.get("memory")
        if directory is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                lines = (directory / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def remove(self) -> None:
        """Remove the groups, whose processes must have been killed. Blocks until they are gone: call it in a thread.

        Raises SandboxError if a process is still there after some seconds.
        """
        for directory in self._unique_directories:
            remove_group(directory)


def remove_group(directory: Path, timeout: float = REMOVE_TIMEOUT) -> None:
    """Remove a group and the groups in it once they are empty. Raises SandboxError if they do not become empty."""
    deadline = time.monotonic() + timeout
    while directory.exists():
        try:
            for child in directory.iterdir():
                if child.is_dir():
                    remove_group(child, timeout)
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SandboxError(f"the control group {directory} cannot be removed: {error.strerror}") from error
            time.sleep(REMOVE_INTERVAL)


def remove_abandoned_groups() -> list[str]:
    """Kill the processes of groups whose owner has ended, and remove these groups; return the removed directories."""
    removed: list[str] = []
    for parent in dict.fromkeys(find_cgroup_parents().directories.values()):
        for directory in parent.glob(f"{GROUP_PREFIX}*"):
            if not is_owner_alive(directory.name.removeprefix(GROUP_PREFIX)):
                _kill_members(directory)
                remove_group(directory)
                removed.append(str(directory))
    return removed


def _kill_members(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)


def _iter_settings(controller: str, limits: ResourceLimits) -> Iterator[tuple[str, str]]:
    """Yield the files of a controller in both versions, with the values to write."""
    if controller == "memory":
        num_bytes = None if limits.memory_mb is None else limits.memory_mb << 20
        yield "memory.memsw.limit_in_bytes", "-1"  # it must never be below the other, which may be raised or lowered
        yield "memory.limit_in_bytes", "-1" if num_bytes is None else str(num_bytes)
        yield "memory.memsw.limit_in_bytes", "-1" if num_bytes is None else str(num_bytes)
        yield "memory.max", "max" if num_bytes is None else str(num_bytes)
        yield "memory.swap.max", "max" if num_bytes is None else "0"
    elif controller == "pids":
        yield "pids.max", "max" if limits.max_processes is None else str(limits.max_processes)
    else:
        quota = None if limits.cpus is None else max(1000, round(limits.cpus * CPU_PERIOD))
        yield "cpu.cfs_quota_us", "-1" if quota is None else str(quota)
        yield "cpu.max", f"{'max' if quota is None else quota} {CPU_PERIOD}"


def _iter_parent_directories() -> Iterator[tuple[str, Path]]:
    """Yield each controller with the directory for new groups: the group of this process, or else the parent of it.

    In the second version, a group that has processes cannot pass controllers on to groups in it; its parent can.
    """
    memberships: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in MEMBERSHIP_FILE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            memberships |= dict.fromkeys(controllers.split(","), path)
    for mount_point, kind, options in _iter_cgroup_mounts():
        if kind == "cgroup":
            for controller in CONTROLLER_OF_CAPABILITY.values():
                if controller in options and controller in memberships:
                    yield controller, mount_point / memberships[controller].lstrip("/")
        else:
            own = mount_point / memberships.get("", "/").lstrip("/")
            for place in (own, own.parent) if own != mount_point else (own,):
                available = _read_words(place / "cgroup.controllers")
                if available and _enable_controllers(place, available):
                    for controller in available & set(CONTROLLER_OF_CAPABILITY.values()):
                        yield controller, place
                    break


def _iter_cgroup_mounts() -> Iterator[tuple[Path, str, set[str]]]:
    """Yield the mount point, the kind ("cgroup" or "cgroup2") and the options of each control group hierarchy."""
    if not MOUNTS_FILE.exists():  # not Linux
        return
    for line in MOUNTS_FILE.read_text().splitlines():
        place, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield Path(place.split()[4]), kind, set(options.replace(",", " ").split())


def _enable_controllers(place: Path, available: set[str]) -> bool:
    """Let groups in `place` limit resources; return whether they can."""
    wanted = available & set(CONTROLLER_OF_CAPABILITY.values())
    enabled = _read_words(place / "cgroup.subtree_control")
    if not wanted <= enabled:
        with contextlib.suppress(OSError):
            (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted - enabled)))
    return wanted <= _read_words(place / "cgroup.subtree_control")


def _read_words(file: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(file.read_text().split())
    return set()


def _find_creation_problem(place: Path, controller: str) -> str | None:
    """Return why no group can be created in `place`; None if one can."""
    directory = place / (GROUP_PREFIX + make_owner_name(next(_numbers)))
    try:
        directory.mkdir()
        directory.rmdir()
    except OSError as error:
        return f"no control group for {controller} can be created in {place}: {error.strerror}"
    return None
