"""Who holds a lock file, for the message to whoever has to wait.

The process that holds a lock alone writes its pid into the file. Processes that share a lock do not, and the file may
still name the last one that held it alone; where the kernel lists its locks (Linux), the list is asked instead.
"""

import contextlib
import os
from pathlib import Path

KERNEL_LOCKS = Path("/proc/locks")


def write_holder(handle: int) -> None:
    """Write the pid of this process, which holds the lock alone. Without room on the disk the lock still holds."""
    os.truncate(handle, 0)
    with contextlib.suppress(OSError):
        os.pwrite(handle, str(os.getpid()).encode(), 0)


def name_holders(handle: int) -> str:
    """Return "process 12" or "processes 12, 13" for those that hold the lock; "" where nobody knows."""
    pids = _listed_holders(os.fstat(handle).st_ino)
    if not pids:
        written = os.pread(handle, 32, 0).decode(errors="replace").strip()
        pids = [int(written)] if written.isdecimal() else []
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else ""


def _listed_holders(inode: int) -> list[int]:
    """Return the pids in lines of the kernel's list such as `1: FLOCK ADVISORY WRITE 12 08:01:34 0 EOF`.

    The device beside the inode is not compared: file systems in layers report another one than `stat` does. A process
    of another container is listed as 0.
    """
    try:
        lines = KERNEL_LOCKS.read_text().splitlines()
    except OSError:
        return []
    locks = [fields for line in lines if len(fields := line.split()) == 8 and fields[1] == "FLOCK"]
    pids = {int(fields[4]) for fields in locks if fields[5].endswith(f":{inode}") and fields[4].isdecimal()}
    return sorted(pids - {0})
