"""A limit on how often the processes of a user on this machine start containers.

A file holds the time of the last start. A process that wants to start a container writes its own time there if the
last start is long enough ago, and otherwise waits and tries again. Nothing is reserved, so a start that is cancelled
while it waits does not delay the others.
"""

import asyncio
import fcntl
import os
import tempfile
import time
from pathlib import Path

from ramify.core.errors import SandboxError

LOCKED_DELAY = 0.01  # seconds until the next try if another process has the file
START_FILE = Path(tempfile.gettempdir()) / f"ramify-container-starts-{os.getuid()}"


async def wait_for_start(max_starts_per_second: float, path: Path = START_FILE) -> None:
    """Wait until another container may be started. The caller limits the time, as `timeouts.boot` does."""
    while (delay := claim_start(path, 1 / max_starts_per_second, time.monotonic())) > 0:
        await asyncio.sleep(delay)


def claim_start(path: Path, interval: float, now: float) -> float:
    """Record a start and return 0, or return the seconds after which one may be possible.

    `now` is on the monotonic clock, which all processes of the machine share. It begins again with every boot, so a
    later time in the file is ignored. Raises SandboxError if the file cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SandboxError(f"the file of container starts cannot be opened: {error}; remove it") from error
    with os.fdopen(fd, "r+") as file:
        if os.fstat(fd).st_uid != os.getuid():
            raise SandboxError(f"the file of container starts {path} belongs to another user; remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return LOCKED_DELAY
        try:
            last_start = float(file.read() or "-inf")
        except ValueError:  # somebody has written to it
            last_start = float("-inf")
        if last_start <= now < last_start + interval:
            return last_start + interval - now
        file.seek(0)
        file.truncate()
        file.write(repr(now))
        return 0.0
