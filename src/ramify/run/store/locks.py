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
    pids = sorted(_read_kernel_holders(fd) - {0})
    if not pids and (written := _read_written_pid(fd)) is not None:
        pids = [written]
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else ""


def find_writer(path: Path) -> int | None:
    """Return the pid of the process that holds the exclusive lock of the file `path`, without locking it; else None.

    It is the process that wrote its pid, if the kernel's list has it, or where there is no such list, if it is alive.
    The pid of a holder in another container is 0.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        written = _read_written_pid(fd)
        if PROC_LOCKS.exists():
            holders = _read_kernel_holders(fd, "WRITE")
            return next((pid for pid in (written, 0) if pid in holders), None)
        return written if written is not None and psutil.pid_exists(written) else None
    finally:
        os.close(fd)


def _read_written_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else None


def _read_kernel_holders(fd: int, kind: str | None = None) -> set[int]:
    """Return the pids in lines of the kernel's list such as `1: FLOCK ADVISORY WRITE 12 08:01:34 0 EOF`.

    Only the inode is compared, not the device: overlay file systems report another device than `stat` does. So the
    holder of another file may be among them. A process of another container is listed as 0. `kind` is WRITE for
    exclusive locks, READ for shared ones, None for both.
    """
    inode = os.fstat(fd).st_ino
    try:
        lines = PROC_LOCKS.read_text().splitlines()
    except OSError:
        return set()
    locks = [fields for line in lines if len(fields := line.split()) == 8 and fields[1] == "FLOCK"]
    locks = [fields for fields in locks if kind in (None, fields[3])]
    return {int(fields[4]) for fields in locks if fields[5].endswith(f":{inode}") and fields[4].isdecimal()}
