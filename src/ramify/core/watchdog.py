"""The watchdog of a process: one thread that ends the process, with a named failure, if what it watches hangs.

It watches every call on a file system. Such a call never returns if the mount is lost, and the thread in it cannot be
ended. So nobody waits for storage with a timeout of its own: a call is registered while it is in flight, and if it is
still there after `storage_limit` seconds, plus the time that its bytes need, the process ends with StorageFailed.

    the run directory hangs    what needs it waits, and the process ends by name
    shared storage hangs       the same, and failed commits are tried again for as long, while the trainer waits

The watchdog adds up the intervals of its polls instead of reading a clock: there are no polls while the process or the
machine is suspended. Others add checks of their own, which are called at every poll.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from ramify.core.errors import RamifyError, StorageFailed

EXIT_FAILED = 1
PRINT_TIMEOUT = 2.0  # seconds for a message: the log that it goes to may be on the storage that hangs


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """Limits of a watchdog, in seconds."""

    poll_interval: float = 0.25
    storage_limit: float = 600.0
    """Time for one call on a file system."""
    ending_limit: float = 60.0
    """The same, once the work of the process has failed or was interrupted."""
    min_transfer_rate: float = 10e6
    """Bytes per second; a call that reads or writes many bytes may take longer than its limit."""
    warning_delay: float = 30.0
    """Time after which a line says which call is still in flight."""


@dataclass(slots=True)
class StorageCall:
    """A call on a file system that is in flight; `num_bytes` may be set meanwhile."""

    path: Path | str
    num_bytes: int
    seconds: float = 0.0


class Watchdog:
    """Polls the calls in flight and the added checks. Its thread starts with the first of them.

    `fail` is called with a failure, in place of the end of the process.
    """

    def __init__(
        self, settings: WatchdogSettings | None = None, fail: Callable[[RamifyError], None] | None = None
    ) -> None:
        self.settings = settings or WatchdogSettings()
        self._fail = fail or self._end_with_failure
        self._calls: dict[int, StorageCall] = {}
        self._checks: list[Callable[[], None]] = []
        self._failed_checks: list[Callable[[], None]] = []  # whose failure was printed
        self._lock = threading.RLock()  # a check may end the process; none runs after it was removed
        self._thread: threading.Thread | None = None
        self.cleanups: list[Callable[[], None]] = []
        """Called before the process ends."""
        self.report: Callable[[RamifyError], object] = _print_failure
        """Prints the failure that ends the process."""
        self.is_ending = False
        """Whether the work of the process has failed or was interrupted."""

    @contextlib.contextmanager
    def watch_storage(self, path: Path | str, num_bytes: int = 0) -> Generator[StorageCall]:
        """Register a call on a file system while the `with` block runs, which must not take long by itself."""
        call = StorageCall(path, num_bytes)
        self._calls[id(call)] = call
        try:
            if self._thread is None:
                self._start()
            yield call
        finally:
            self._calls.pop(id(call), None)  # a forked process has forgotten it

    def list_calls(self, min_seconds: float = 0.0) -> list[StorageCall]:
        """Return the calls that have been in flight for `min_seconds`."""
        return [call for call in list(self._calls.values()) if call.seconds >= min_seconds]

    def get_limit(self, call: StorageCall) -> float:
        """Return the seconds for which a call may be in flight."""
        limit = self.settings.ending_limit if self.is_ending else self.settings.storage_limit
        return limit + call.num_bytes / self.settings.min_transfer_rate

    def add_check(self, check: Callable[[], None]) -> None:
        """Call a function at every poll, in the thread of the watchdog."""
        self._checks.append(check)
        if self._thread is None:
            self._start()

    def remove_check(self, check: Callable[[], None]) -> None:
        """Stop calling a function; it does not run any more when this returns."""
        with self._lock:
            self._checks.remove(check)

    def reset(self) -> None:
        """Forget what the parent has watched; its thread does not run in a forked process."""
        self._calls, self._checks, self._failed_checks = {}, [], []
        self.cleanups, self.is_ending = [], False
        self._lock, self._thread = threading.RLock(), None

    def poll(self) -> None:
        """Look at everything once."""
        interval = self.settings.poll_interval
        for call in self.list_calls():
            call.seconds += interval
            if call.seconds > self.get_limit(call):
                problem = f"{call.path}: the storage has not answered for {call.seconds:.0f} s"
                self._fail(StorageFailed(f"{problem}; check the disk and the mounts, then repeat the command"))
            elif call.seconds - interval < self.settings.warning_delay <= call.seconds:
                line = f"warning: {call.path}: the storage has not answered for {call.seconds:.0f} s"
                _call_in_time(partial(print_unlocked, line))
        with self._lock:
            for check in list(self._checks):
                try:
                    check()
                except Exception as error:  # noqa: BLE001 - nothing would be watched without this thread
                    if check not in self._failed_checks:
                        self._failed_checks.append(check)
                        line = f"warning: a check of the watchdog failed, and is repeated: {error!r}"
                        _call_in_time(partial(print_unlocked, line))

    def end_process(self, print_message: Callable[[], object], exit_code: int = EXIT_FAILED) -> NoReturn:
        """Print a message and exit at once: threads that hang cannot be ended."""
        for clean_up in self.cleanups:
            with contextlib.suppress(Exception):
                clean_up()
        _call_in_time(_show_cursor)
        _call_in_time(print_message)
        os._exit(exit_code)

    def _end_with_failure(self, error: RamifyError) -> NoReturn:
        self.end_process(partial(self.report, error))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll_loop, name="watchdog", daemon=True)
                self._thread.start()

    def _poll_loop(self) -> None:
        while True:
            time.sleep(self.settings.poll_interval)
            self.poll()


def _show_cursor() -> None:
    """Show the cursor of the terminal again, which the display has hidden."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")


def print_unlocked(message: str) -> None:
    """Print a line to standard error; `sys.stderr` may be locked by a thread that hangs."""
    os.write(2, f"{message}\n".encode())


def _print_failure(error: RamifyError) -> None:
    print_unlocked(f"{error.name}: {error.message}")


def _call_in_time(print_message: Callable[[], object]) -> None:
    """Call a function in a thread, which is left behind if it hangs."""
    thread = threading.Thread(target=print_message, daemon=True)
    thread.start()
    thread.join(PRINT_TIMEOUT)


WATCHDOG = Watchdog()
watch_storage = WATCHDOG.watch_storage
os.register_at_fork(after_in_child=WATCHDOG.reset)
