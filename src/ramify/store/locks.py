"""The processes that hold a lock file, for the message of RunBusy.

A process that holds an exclusive lock writes its pid into the file. Processes that hold a shared lock do not, and the
file may still name the last exclusive holder. On Linux the kernel's list of locks is read first, which has both.
"""

import contextlib
import os
from pathlib import Path

import psutil

PROC_LOCKS = Path("/proc/locks")


def write_holder(fd: int) -> None:
    """Write the pid of this process, the exclusive holder. A full disk is ignored, because the lock still holds."""
    os.truncate(fd, 0)
    with contextlib.suppress(OSError):
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def describe_holders(fd: int) -> str:
    """Return "process 12" or "processes 12, 13" for the holders of the lock; "" if they are not known."""
    pids = _read_kernel_holders(os.fstat(fd).st_ino)
    if not pids:
        written = os.pread(fd, 32, 0).decode(errors="replace").strip()
        pids = [int(written)] if written.isdecimal() else []
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else ""


def find_writer(path: Path) -> int | None:
    """Return the pid of the process that holds the exclusive lock of the file `path`, without locking it; else None.

    Where the kernel has no list of locks, it is the last process that wrote its pid, if it is alive.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if PROC_LOCKS.exists():
            return next(iter(_read_kernel_holders(os.fstat(fd).st_ino, "WRITE")), None)
        written = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(written) if written.isdecimal() and psutil.pid_exists(int(written)) else None
    finally:
        os.close(fd)


def _read_kernel_holders(inode: int, kind: str | None = None) -> list[int]:
    """Return the pids in lines of the kernel's list such as `1: FLOCK ADVISORY WRITE 12 08:01:34 0 EOF`.

    Only the inode is compared, not the device: overlay file systems report another device than `stat` does. A process
    of another container is listed as 0. `kind` is WRITE for exclusive locks, READ for shared ones, None for both.
    """
    try:
        lines = PROC_LOCKS.read_text().splitlines()
    except OSError:
        return []
    locks = [fields for line in lines if len(fields := line.split()) == 8 and fields[1] == "FLOCK"]
    locks = [fields for fields in locks if kind in (None, fields[3])]
    pids = {int(fields[4]) for fields in locks if fields[5].endswith(f":{inode}") and fields[4].isdecimal()}
    return sorted(pids - {0})
