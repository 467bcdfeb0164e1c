"""Helpers for asyncio: timeouts that name their operation, retries, calls that may hang, tasks, and services."""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from ramify.core.errors import DeadlineExceeded, RamifyError

CANCEL_TIMEOUT = 10.0  # seconds for a thread that reads or writes files to end after its caller was cancelled

T = TypeVar("T")
R = TypeVar("R")


class fail_after:  # noqa: N801 - used like a function, as `asyncio.timeout` is
    """Raises DeadlineExceeded if the block takes longer than `timeout` seconds; `what` names the operation.

    A TimeoutError that the block raises itself passes unchanged. This is a class rather than a generator for speed:
    every phase of every rollout uses it.
    """

    __slots__ = ("_scope", "_timeout", "_what")

    def __init__(self, timeout: float, what: str | Callable[[], str]) -> None:
        self._timeout, self._what = timeout, what
        self._scope = asyncio.timeout(timeout)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as timeout_error:
            what = self._what if isinstance(self._what, str) else self._what()
            raise DeadlineExceeded(f"{what} took longer than {self._timeout:g} s") from timeout_error


async def retry(call: Callable[[], Awaitable[T]], *, max_retries: int, backoff: float) -> T:
    """Return the result of `call`, which is repeated after a retryable RamifyError, at most `max_retries` times.

    The first repetition waits `backoff` seconds, and each further one twice as long.
    """
    for num_retries in range(max_retries):
        try:
            return await call()
        except RamifyError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(backoff * 2**num_retries)
    return await call()


async def call_in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Return the result of a call that may hang, from a thread of this name.

    Python waits at its exit for the threads of `asyncio.to_thread`, but not for this one, which goes on if the caller
    stops waiting.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # mark it running, so that cancelling a waiter does not cancel it

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)

    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError as error:  # the process may start no more threads
        future.set_exception(error)
    return await asyncio.wrap_future(future)


async def call_storage(function: Callable[[], T], name: str) -> T:
    """Return the result of a function that reads or writes files, from a thread of this name.

    The event loop goes on while the storage hangs, until the watchdog ends the process. If the caller is cancelled, the
    thread is waited for, at most CANCEL_TIMEOUT seconds, so that what it writes does not follow what comes next.
    """
    call = asyncio.ensure_future(call_in_daemon_thread(function, name))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call], timeout=CANCEL_TIMEOUT)
        raise


def map_in_daemon_threads(function: Callable[[T], R], items: Iterable[T], *, max_threads: int) -> list[R]:
    """Return the results of a function for each item, from at most `max_threads` threads, and one per core.

    Raises the error of the first item that failed.

    Python does not wait for these threads at exit, since they may hang; it would wait for a ThreadPoolExecutor's.
    """
    calls: list[tuple[T, Future[R]]] = [(item, Future()) for item in items]
    pending = deque(calls)

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                item, future = pending.popleft()
                try:
                    future.set_result(function(item))
                except BaseException as error:  # noqa: BLE001 - the caller gets it
                    future.set_exception(error)

    for _ in range(min(max_threads, len(calls), os.cpu_count() or 1)):
        threading.Thread(target=work, daemon=True).start()
    try:
        return [future.result() for _, future in calls]
    finally:
        pending.clear()


async def wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait until the event is set, for at most `timeout` seconds; return whether it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped."""
    ending_tasks = list(tasks)
    for task in ending_tasks:
        task.cancel()
    await asyncio.gather(*ending_tasks, return_exceptions=True)


def unwrap_exception_group(error: BaseException) -> BaseException:
    """Return the first RamifyError in an exception group, which may hold groups, else its first exception."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast(BaseExceptionGroup[BaseException], error)
    errors = [unwrap_exception_group(nested) for nested in group.exceptions]
    return next((nested for nested in errors if isinstance(nested, RamifyError)), errors[0])


class AsyncService:
    """Something that works between `start` and `close`, or in `async with`."""

    async def start(self) -> Self:
        """Start it, and return it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
