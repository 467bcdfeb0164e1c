"""Helpers for asyncio: a timeout that names its operation, retries, calls that may hang, and the ownership of tasks."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

from ramify.core.errors import DeadlineExceeded, RamifyError, StorageFailed
from ramify.core.files import AbandonableCall

CHANGE_TIMEOUT = 1.0  # seconds for a change of files that has begun when its call is abandoned
POLL_INTERVAL = 0.01  # seconds between two looks at a thread that may hang

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")


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


class SingleThreadCaller:
    """Calls functions that may hang, each in a daemon thread that begins when the one before has ended.

    Storage that hangs thus holds one thread, however often a call that was given up is repeated.
    """

    def __init__(self) -> None:
        self._last_call: Future[Any] | None = None

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Return the result of a call as `call_in_daemon_thread` does, after the last call has ended."""
        while self._last_call is not None and not self._last_call.done():
            await asyncio.sleep(POLL_INTERVAL)
        self._last_call = future = Future[T]()
        return await _call_in_daemon_thread(function, name, future)


async def call_in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Return the result of a call that may hang, such as one to a mount that is gone, from a thread of this name.

    Python waits at its exit for the threads of `asyncio.to_thread`, but not for this one. If the caller stops waiting,
    the call is abandoned: it may go on, but replaces and renames no files any more. A change that has begun is
    waited for, at most CHANGE_TIMEOUT seconds.
    """
    return await _call_in_daemon_thread(function, name, Future[T]())


async def _call_in_daemon_thread(function: Callable[[], T], name: str, future: "Future[T]") -> T:
    """Do what `call_in_daemon_thread` does; `future` is done when the call has ended."""
    abandonable = AbandonableCall()
    future.set_running_or_notify_cancel()  # mark it running, so that cancelling a waiter does not cancel it

    def call() -> None:
        try:
            future.set_result(abandonable.run(function))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)

    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError as error:  # the process may start no more threads
        future.set_exception(error)
    try:
        return await asyncio.wrap_future(future)
    finally:
        if not future.done():
            abandonable.abandon()
            await _wait_for_change(abandonable)


async def _wait_for_change(call: AbandonableCall) -> None:
    deadline = time.monotonic() + CHANGE_TIMEOUT
    while call.is_changing and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL)


def map_in_daemon_threads(function: Callable[[T], R], items: Iterable[T], *, max_threads: int) -> list[R]:
    """Return the results of a function for each item, from at most `max_threads` threads, and one per core.

    Raises the error of the first item that failed.

    Python does not wait at its exit for these threads, which may hang; it waits for those of a ThreadPoolExecutor.
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


async def call_storage(
    function: Callable[[], T], what: str, *, timeout: float, caller: SingleThreadCaller | None = None
) -> T:
    """Return the result of a call that reads or writes files, which hangs if their storage does.

    Raises StorageFailed after `timeout` seconds, with `what` as the subject. With a `caller`, the call first waits for
    the last call of that caller. A thread that hangs is left behind, but replaces and renames no files any more, unless
    it hangs in the change itself (`ramify.core.files`). It may still create directories, and a change of the ledger
    that it has queued is still stored.
    """
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            return await (call_in_daemon_thread if caller is None else caller.call)(function, what)
    except TimeoutError as error:
        if not scope.expired():  # it is that of the function
            raise
        problem = f"{what}: the storage did not answer within {timeout:g} s"
        raise StorageFailed(f"{problem}; check the disk and the mounts, then repeat the command") from error


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped."""
    ending_tasks = list(tasks)
    for task in ending_tasks:
        task.cancel()
    await asyncio.gather(*ending_tasks, return_exceptions=True)


class WatchTasks(Generic[K]):
    """Tasks by what they watch. One that ends is forgotten; the failure of the first that fails is kept."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def __iter__(self) -> Iterator[K]:
        """Iterate over what is watched."""
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, watched: K, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that watches `watched`."""
        self._tasks[watched] = task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda task: self._record_end(watched, task))

    def _record_end(self, watched: K, task: asyncio.Task[None]) -> None:
        del self._tasks[watched]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._failed.set()

    async def wait_failed(self) -> None:
        """Wait until a task fails, and raise its failure."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await cancel_all(self._tasks.values())
