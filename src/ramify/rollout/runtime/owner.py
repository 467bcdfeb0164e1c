"""Names that tell which process made a thing, and the removal of what ended processes left behind.

    PID-START-BOOT-MACHINE-NUMBER

START counts clock ticks from the boot, so an adjusted clock changes nothing. BOOT is the id of the boot. MACHINE is an
id of the machine and its process ids: what another machine made in a shared directory is never removed here.
"""

import contextlib
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from ramify.core.errors import SandboxError

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
OWNER_PATTERN = re.compile("(?P<pid>[0-9]+)-(?P<start>[0-9]+)-(?P<boot>[0-9a-f]+)-(?P<machine>[0-9a-f]+)-.+")
ID_LENGTH = 8  # of the ids in names, which are short because the names are parts of paths


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that an ended process left behind: its description, and the function that removes it."""

    description: str
    remove: Callable[[], None]


def make_owner_name(number: int | str) -> str:
    """Return a name that identifies this process, with a number."""
    return f"{_describe_process(os.getpid())}-{number}"


def is_owner_alive(name: str) -> bool:
    """Return whether the process that made a name still runs. A name that cannot be judged here counts as in use."""
    match = OWNER_PATTERN.fullmatch(name)
    if match is None or match["machine"] != get_machine_id()[:ID_LENGTH]:
        return True
    return match["boot"] == _get_boot_id() and _get_start(int(match["pid"])) == int(match["start"])


def remove_leftovers(leftovers: Iterable[Leftover]) -> Iterator[str]:
    """Remove them; yield the description of each that is gone.

    Raises SandboxError at the end if some could not be removed, with the reasons.
    """
    failures: list[str] = []
    for leftover in leftovers:
        try:
            leftover.remove()
        except SandboxError as error:
            failures.append(f"{leftover.description}: {error.message}")
        except OSError as error:
            failures.append(f"{leftover.description}: {error}")
        else:
            yield leftover.description
    if failures:
        raise SandboxError(f"{len(failures)} not removed: {'; '.join(failures)}")


@cache
def get_machine_id() -> str:
    """Return an id of this machine, or of the container that this process runs in: process ids are unique in it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def _describe_process(pid: int) -> str:
    return f"{pid}-{_get_start(pid)}-{_get_boot_id()}-{get_machine_id()[:ID_LENGTH]}"


@cache
def _get_boot_id() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID_FILE.read_text()[:ID_LENGTH]
    return "0"  # not Linux


def _get_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if it has ended."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(pid).create_time() * 100)
        return None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])
