"""A lock that the trainer holds while it computes a step, so that an engine on the same GPU waits meanwhile.

Two processes that compute on one GPU alternate every few milliseconds, and a training step takes about twice as long.
The engine therefore checks the lock between two of its steps; requests keep their state. The kernel releases the lock
if the trainer dies, and the engine ignores a lock that is held for longer than HOLD_TIMEOUT.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

from ramify.core.files import flock_with_timeout

TRAINING_LOCK_VARIABLE = "RAMIFY_TRAINING_LOCK"  # the lock of processes that share a GPU; set by the launcher
RESERVED_MEMORY_VARIABLE = "RAMIFY_RESERVED_GPU_MEMORY"  # bytes of the trainer's GPU for engines; set by the launcher
HOLD_TIMEOUT = 120.0  # seconds; the first step compiles its kernels
ACQUIRE_TIMEOUT = 1.0  # seconds
POLL_INTERVAL = 1e-3  # seconds between two tries to acquire it


class TrainingLock:
    """The lock at `path`, or no lock without a path. The ranks of a trainer hold it together.

    An engine waits for a trainer at most `hold_timeout` seconds, and a trainer for an engine `acquire_timeout` seconds.
    """

    def __init__(
        self, path: Path | None, *, hold_timeout: float = HOLD_TIMEOUT, acquire_timeout: float = ACQUIRE_TIMEOUT
    ) -> None:
        self._hold_timeout, self._acquire_timeout = hold_timeout, acquire_timeout
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) if path else None
        self._held_since: float | None = None

    @classmethod
    def from_environment(cls) -> "TrainingLock":
        """Return the lock that the launcher chose for this process."""
        path = os.environ.get(TRAINING_LOCK_VARIABLE)
        return cls(Path(path) if path else None)

    @property
    def exists(self) -> bool:
        """Whether there is a lock."""
        return self._fd is not None

    @contextlib.contextmanager
    def hold(self, warn: Callable[[str], None] = lambda line: None) -> Generator[None]:
        """Hold the lock, as a trainer. If it cannot be acquired in time, warn and go on without it."""
        if self._fd is None:
            yield
            return
        # Other ranks may hold it, too. An engine holds it only for an instant, unless it is stopped in that instant.
        timeout = self._acquire_timeout
        if not flock_with_timeout(self._fd, fcntl.LOCK_SH, timeout=timeout, poll_interval=POLL_INTERVAL):
            held = f"an engine has held the training lock for {timeout:g} s"
            warn(f"{held}; this step trains without waiting")
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def should_wait(self) -> bool:
        """Return whether a trainer holds the lock, for less than `hold_timeout` so far, so that the engine has to wait.

        This takes the lock for an instant, and remembers since when a trainer holds it.
        """
        if self._fd is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held_since = self._held_since or time.monotonic()
            return time.monotonic() - self._held_since < self._hold_timeout
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._held_since = None
        return False
