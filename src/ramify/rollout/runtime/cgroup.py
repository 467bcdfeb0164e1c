"""Control groups: limits on the memory, processes and cores of all programs of a rollout together.

Linux has two versions of control groups, and a machine may have both at once: with the first, each controller has a
hierarchy of its own. Whether a process may create and join groups depends on the machine, so it is tried once. The
name of a group holds the process that made it, so that the groups of a killed process can be found and removed.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath

from ramify.core.errors import SandboxError
from ramify.env.runtime import Capability, ResourceLimits
from ramify.processes.program import run_program
from ramify.rollout.runtime.owner import Leftover, is_owner_alive, make_owner_name

MOUNTS_FILE = Path("/proc/self/mountinfo")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")
GROUP_PREFIX = "ramify-"
REMOVE_TIMEOUT = 5.0  # seconds for the processes of a group to be gone after they were killed
REMOVE_INTERVAL = 0.005
PROBE_TIMEOUT = 20.0  # seconds for a process to join a group
CPU_PERIOD = 100_000  # microseconds
CONTROLLER_OF_CAPABILITY = {
    Capability.MEMORY_LIMIT: "memory",
    Capability.PROCESS_LIMIT: "pids",
    Capability.CPU_LIMIT: "cpu",
}
LIMIT_FILES = {  # in the second version and in the first
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max",),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
}
SWAP_FILES = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # missing where the kernel does not count swap

JOIN_SCRIPT = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupParents:
    """The directories in which this process may create groups, by controller, and why it may not for the others."""

    directories: Mapping[str, Path]
    reasons: Mapping[str, str]


@cache
def find_cgroup_parents() -> CgroupParents:
    """Return where groups can be created and joined. It is tried once in each place."""
    directories: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    places = dict(_iter_parent_directories())
    for controller in CONTROLLER_OF_CAPABILITY.values():
        if controller not in places:
            reasons[controller] = f"there is no control group for {controller} in which this process may create others"
        elif reason := _find_group_problem(places[controller], controller):
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
        return build_join_command(self._unique_directories, argv)

    def add_process(self, pid: int) -> None:
        """Move a process into the groups. Raises OSError if it has ended or the kernel refuses it."""
        for directory in self._unique_directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def set_limits(self, limits: ResourceLimits) -> None:
        """Apply limits. Raises SandboxError if the kernel refuses one."""
        try:
            for controller, directory in self._directories.items():
                is_second_version = (directory / "cgroup.controllers").exists()
                for name, value in _iter_settings(controller, limits, is_second_version=is_second_version):
                    if name not in SWAP_FILES or (directory / name).exists():
                        (directory / name).write_text(value)
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
        """Kill all processes of the groups and remove the groups. Blocks until they are gone: call it in a thread.

        Raises SandboxError if a group is still there after some seconds.
        """
        failures: list[SandboxError] = []
        for directory in self._unique_directories:
            try:
                remove_group(directory)
            except SandboxError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def build_join_command(directories: Iterable[Path], argv: Sequence[str]) -> list[str]:
    """Return a command line that joins groups and then becomes the program of `argv`."""
    files = [str(directory / "cgroup.procs") for directory in directories]
    return ["/bin/sh", "-c", JOIN_SCRIPT, "sh", *files, "--", *argv]


def remove_group(directory: Path, timeout: float = REMOVE_TIMEOUT) -> None:
    """Kill the processes of a group and of the groups in it, and remove the groups.

    Raises SandboxError if they do not become empty.
    """
    deadline = time.monotonic() + timeout
    while directory.exists():
        try:
            for group in _list_groups(directory):
                _kill_members(group)
            for group in _list_groups(directory):
                group.rmdir()
        except OSError as error:  # also if a group was removed or made meanwhile
            if time.monotonic() > deadline:
                raise SandboxError(f"the control group {directory} cannot be removed: {error.strerror}") from error
            time.sleep(REMOVE_INTERVAL)


def find_leftover_groups(timeout: float = REMOVE_TIMEOUT) -> list[Leftover]:
    """Return the groups whose owner has ended. `timeout`: seconds for each to become empty."""
    return [
        Leftover(f"control group {directory}", partial(remove_group, directory, timeout))
        for parent in dict.fromkeys(find_cgroup_parents().directories.values())
        for directory in parent.glob(f"{GROUP_PREFIX}*")
        if not is_owner_alive(directory.name.removeprefix(GROUP_PREFIX))
    ]


def _list_groups(directory: Path) -> list[Path]:
    """Return a group and the groups in it, the innermost first."""
    return [Path(path) for path, _, _ in os.walk(directory, topdown=False)]


def _kill_members(directory: Path) -> None:
    file = directory / "cgroup.procs"
    for pid in map(int, file.read_text().split() if file.exists() else ()):
        if pid > 0:  # 0 is a process that this one cannot see; as an argument it would mean this one's own group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _iter_settings(controller: str, limits: ResourceLimits, *, is_second_version: bool) -> Iterator[tuple[str, str]]:
    """Yield the files of a controller, with the values to write."""
    no_limit = "max" if is_second_version else "-1"
    if controller == "memory":
        memory = no_limit if limits.memory_mb is None else str(limits.memory_mb << 20)
        if is_second_version:
            yield "memory.max", memory
            yield "memory.swap.max", no_limit if limits.memory_mb is None else "0"
        else:
            yield "memory.memsw.limit_in_bytes", no_limit  # never below the other, which may be raised or lowered
            yield "memory.limit_in_bytes", memory
            yield "memory.memsw.limit_in_bytes", memory
    elif controller == "pids":
        yield "pids.max", "max" if limits.max_processes is None else str(limits.max_processes)
    else:
        quota = no_limit if limits.cpus is None else str(max(1000, round(limits.cpus * CPU_PERIOD)))
        if is_second_version:
            yield "cpu.max", f"{quota} {CPU_PERIOD}"
        else:
            yield "cpu.cfs_quota_us", quota


def _iter_parent_directories() -> Iterator[tuple[str, Path]]:
    """Yield each controller with the directory for new groups: the group of this process, or else the parent of it.

    In the second version, a group that has processes cannot pass controllers on to groups in it; its parent can.
    """
    memberships: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in MEMBERSHIP_FILE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            memberships |= dict.fromkeys(controllers.split(","), path)
    for mount in _iter_cgroup_mounts():
        if not mount.is_second_version:
            for controller in CONTROLLER_OF_CAPABILITY.values():
                if controller in mount.options and controller in memberships:
                    own = mount.find_group(memberships[controller])
                    if own is not None:
                        yield controller, own
        elif (own := mount.find_group(memberships.get("", "/"))) is not None:
            for place in (own, own.parent) if own != mount.point else (own,):
                enabled = _enable_controllers(place)
                yield from ((controller, place) for controller in sorted(enabled))
                if enabled:
                    break


@dataclass(frozen=True, slots=True)
class _CgroupMount:
    """A mounted hierarchy. `root` is the group that its mount point shows: in a container often not the topmost."""

    root: PurePosixPath
    point: Path
    is_second_version: bool
    options: frozenset[str]

    def find_group(self, path: str) -> Path | None:
        """Return the directory of a group, None if the mount does not show it."""
        group = PurePosixPath(path)
        if not group.is_relative_to(self.root) or ".." in group.parts:
            return None
        return self.point / group.relative_to(self.root)


def _iter_cgroup_mounts() -> Iterator[_CgroupMount]:
    if not MOUNTS_FILE.exists():  # not Linux
        return
    for line in MOUNTS_FILE.read_text().splitlines():
        place, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = place.split()[3:5]
            words = frozenset(options.replace(",", " ").split())
            yield _CgroupMount(PurePosixPath(root), Path(point), kind == "cgroup2", words)


def _enable_controllers(place: Path) -> set[str]:
    """Let groups in `place` limit resources; return the controllers that do. Each is enabled by itself."""
    file = place / "cgroup.subtree_control"
    wanted = _read_words(place / "cgroup.controllers") & set(CONTROLLER_OF_CAPABILITY.values())
    for controller in sorted(wanted - _read_words(file)):
        with contextlib.suppress(OSError):
            file.write_text(f"+{controller}")
    return wanted & _read_words(file)


def _read_words(file: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(file.read_text().split())
    return set()


def _find_group_problem(place: Path, controller: str) -> str | None:
    """Return why a group in `place` cannot limit processes of this user; None if it can."""
    directory = place / (GROUP_PREFIX + make_owner_name(next(_numbers)))
    try:
        directory.mkdir()
    except OSError as error:
        return f"no control group for {controller} can be created in {place}: {error.strerror}"
    try:
        names = LIMIT_FILES[controller]
        if not any((directory / name).exists() for name in names):
            return f"control groups in {place} have no file {' or '.join(names)}"
        probe = run_program(build_join_command([directory], ["true"]), timeout=PROBE_TIMEOUT)
        if not probe.ok:
            return f"no process can join a control group in {place}: {probe.stderr or probe.text}"
    except OSError as error:
        return f"control groups in {place} cannot be read: {error.strerror}"
    finally:
        with contextlib.suppress(SandboxError):
            remove_group(directory)
    return None
