"""Helpers that make `evaluate`, `rl` and `sft` work in a notebook, where an event loop is already running.

A call blocks until its result is there, in a notebook as in a script. If the calling thread has an event loop, the call
runs its own loop in another thread. The result can also be awaited, which returns it unchanged.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from typing import Any, Generic, Self, TypeVar

from ramify.core.async_calls import call_storage

T = TypeVar("T")
POLL_INTERVAL = 0.5  # seconds after which the waiting thread handles a signal
CLEANUP_TIMEOUT = 120.0  # seconds for an interrupted coroutine to clean up


class AwaitableResult:
    """A result that can be awaited, for code written with `await`; awaiting it returns the result itself."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, Self]:
        yield from ()  # makes this function a generator
        return self


def has_running_loop() -> bool:
    """Return whether this thread runs an event loop, as the thread of a notebook does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_interactive() -> bool:
    """Return whether the output goes to a terminal or a notebook."""
    return sys.stdout.isatty() or has_running_loop()


def run_coroutine(coroutine: Coroutine[Any, Any, T], *, cleanup_timeout: float = CLEANUP_TIMEOUT) -> T:
    """Run a coroutine and return its result.

    An interrupt cancels it, and is raised after its cleanup, or after `cleanup_timeout` seconds. Another interrupt
    cancels the cleanup.
    """
    return _LoopThread(coroutine).run(cleanup_timeout) if has_running_loop() else asyncio.run(coroutine)


def call_interruptible(function: Callable[[], T], name: str) -> T:
    """Return the result of a function that reads or writes files, whose storage may hang; an interrupt is raised."""
    return run_coroutine(call_storage(function, name))


class _LoopThread(Generic[T]):
    """A thread with an event loop for one coroutine."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
        self._done: Future[T] = Future()
        self._thread = threading.Thread(target=self._run_loop, name="ramify", daemon=True)

    def run(self, cleanup_timeout: float) -> T:
        interrupt: BaseException | None = None
        is_started, is_cancelled, deadline = False, False, math.inf
        while True:
            try:
                if not is_started:
                    is_started = True
                    self._thread.start()  # the coroutine may run, and an interrupt come, before this returns
                if self._done.done() or time.monotonic() >= deadline:
                    break
                if interrupt is not None and not is_cancelled:
                    is_cancelled, deadline = True, time.monotonic() + cleanup_timeout
                    self._cancel()
                wait([self._done], POLL_INTERVAL)
            except BaseException as error:  # noqa: BLE001 - this thread was interrupted; raised below
                interrupt, is_cancelled = error, False
        if interrupt is not None:
            raise interrupt
        self._thread.join(CLEANUP_TIMEOUT)
        return self._done.result()

    def _cancel(self) -> None:
        loop, task = self._started.result(CLEANUP_TIMEOUT)
        loop.call_soon_threadsafe(task.cancel)

    def _run_loop(self) -> None:
        try:
            result = asyncio.run(self._run_coroutine())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self._done.set_exception(error)
        else:
            self._done.set_result(result)

    async def _run_coroutine(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._started.set_result((asyncio.get_running_loop(), task))
        return await self._coroutine
