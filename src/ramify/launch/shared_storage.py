"""File operations at the start and end of a run, each with a deadline, because a lost network mount blocks forever.

A call that hangs is left behind in its thread, where it replaces and renames nothing any more (`ramify.core.files`),
and StorageFailed ends the run.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ramify.core.async_calls import call_storage
from ramify.core.errors import RamifyError
from ramify.core.interactive import run_coroutine
from ramify.run.fencing.directory_store import DirectoryStore
from ramify.run.store.head_replication import STORAGE_TIMEOUT

CLEANUP_TIMEOUT = 60.0  # seconds to remove files that the run no longer needs
MIN_TRANSFER_RATE = 10e6  # bytes per second that storage must read or write; slower storage counts as hanging

T = TypeVar("T")


def call_storage_blocking(function: Callable[[], T], what: object, *, timeout: float | None = None) -> T:
    """Return the result of a call that reads or writes files, outside of an event loop.

    Raises StorageFailed after `timeout` seconds, STORAGE_TIMEOUT by default; `what` names the files.
    """
    return run_coroutine(call_storage(function, str(what), timeout=STORAGE_TIMEOUT if timeout is None else timeout))


def get_transfer_timeout(num_bytes: int) -> float:
    """Return the seconds for a call that reads or writes that many bytes."""
    return STORAGE_TIMEOUT + num_bytes / MIN_TRANSFER_RATE


def clean_up_storage(function: Callable[[], None], what: object, print_line: Callable[[str], None]) -> None:
    """Call a function that removes files. If that fails, or takes too long, print a line and go on."""
    try:
        call_storage_blocking(function, what, timeout=CLEANUP_TIMEOUT)
    except (OSError, RamifyError) as error:
        reason = f"{error.name}: {error.message}" if isinstance(error, RamifyError) else f"{what}: {error}"
        print_line(f"files were not removed: {reason}")


class TimedDirectoryStore(DirectoryStore):
    """A `DirectoryStore` whose methods raise StorageFailed if the storage does not answer."""

    def create(self, name: str, data: bytes) -> bool:
        """Create `name` with all of `data` as `DirectoryStore` does.

        After StorageFailed it may yet be created, if the storage hung while it made the final link.
        """
        return call_storage_blocking(partial(super().create, name, data), self.directory / name)

    def read(self, name: str) -> bytes | None:
        """Return the data of `name`; None if it does not exist."""
        return call_storage_blocking(partial(super().read, name), self.directory / name)
