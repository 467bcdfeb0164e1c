"""Threads for blocking hooks: one by default, another whenever a job has waited too long for it.

Most hooks return at once. With one thread per hook, waking the threads, which then wait for each other's interpreter
lock, would cost several times more than the hooks. So one thread runs one job after the other, and another thread
starts if a job has not started after a few milliseconds because the job before it blocks.

A thread cannot be stopped from outside. If a job is cancelled while it runs, its thread no longer counts towards
`MAX_THREADS` and exits when the job returns, so code that never returns cannot use up all threads.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

QUEUE_TIMEOUT = 0.005  # seconds that a job waits for a busy thread before another one starts
IDLE_TIMEOUT = 5.0  # seconds that the last thread waits for a job before it exits
MAX_THREADS = 64  # threads that run jobs
MAX_DETACHED_THREADS = 1024  # threads that may run cancelled jobs; further ones count towards MAX_THREADS

_threads_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, HookThreads]" = WeakKeyDictionary()


async def run_in_hook_thread(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of `function(**kwargs)`, called in a hook thread. An awaitable result is awaited here."""
    loop = asyncio.get_running_loop()
    threads = _threads_by_loop.get(loop)
    if threads is None:
        threads = _threads_by_loop[loop] = HookThreads()
    result = await threads.run(_HookJob(function, kwargs, loop.create_future()))
    return await result if inspect.isawaitable(result) else result


class _HookJob:
    """A function call, and its result or error once `done` is set."""

    __slots__ = ("context", "detached", "done", "error", "finished", "function", "kwargs", "result", "started")

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any], done: asyncio.Future[None]) -> None:
        self.function, self.kwargs, self.done = function, kwargs, done
        self.context = contextvars.copy_context()
        self.started = self.finished = self.detached = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        self.started = True
        if self.done.cancelled():
            return
        try:
            self.result = self.context.run(self.function, **self.kwargs)
        except Exception as error:  # noqa: BLE001 - `HookThreads.run` raises it in the waiting task
            self.error = error
        except BaseException as error:  # noqa: BLE001 - `exit()` in a hook must not end the process
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.error = RuntimeError(text).with_traceback(error.__traceback__)


class HookThreads:
    """The threads of one event loop. Each loop iteration delivers at most one result, so that none gets long."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_HookJob] = SimpleQueue()
        self._finished_jobs: deque[_HookJob] = deque()
        self._delivery_scheduled = False  # whether the loop will call `_deliver_one`
        self._num_active = self._num_detached = 0
        self._lock = threading.Lock()

    async def run(self, job: _HookJob) -> Any:
        """Run a job and return its result. A job that is cancelled before it has started never starts."""
        self._jobs.put(job)
        if not self._num_active:
            self._start_thread()
        timer = job.done.get_loop().call_later(QUEUE_TIMEOUT, self._start_thread_if_queued, job)
        try:
            await job.done
        except asyncio.CancelledError:
            self._detach(job)
            raise
        finally:
            timer.cancel()
        if job.error is not None:
            raise job.error
        return job.result

    def _start_thread_if_queued(self, job: _HookJob) -> None:
        if not job.started and self._num_active < MAX_THREADS:
            self._start_thread()

    def _detach(self, job: _HookJob) -> None:
        with self._lock:
            if not job.started or job.finished or self._num_detached >= MAX_DETACHED_THREADS:
                return
            job.detached = True
            self._num_active -= 1
            self._num_detached += 1
        if not self._jobs.empty() and self._num_active < MAX_THREADS:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._lock:
            self._num_active += 1
        threading.Thread(target=self._run_jobs, name="hook", daemon=True).start()

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            job.run()
            with self._lock:
                job.finished = True
                self._num_detached -= job.detached
            if job.detached:
                return  # this thread no longer counts
            self._post_result(job)
            del job  # so that the result can be freed while the thread waits

    def _next_job(self) -> _HookJob | None:
        """Return the next job, or None if the thread should exit: without queued jobs, all threads but one exit.

        If a job is queued at the moment the last thread exits, `_start_thread_if_queued` starts another.
        """
        try:
            return self._jobs.get_nowait() if self._num_active > 1 else self._jobs.get(timeout=IDLE_TIMEOUT)
        except Empty:
            with self._lock:
                self._num_active -= 1
            return None

    def _post_result(self, job: _HookJob) -> None:
        self._finished_jobs.append(job)
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                job.done.get_loop().call_soon_threadsafe(self._deliver_one)

    def _deliver_one(self) -> None:
        """Set the result of one finished job; runs in the event loop."""
        job = self._finished_jobs.popleft() if self._finished_jobs else None
        if job is not None and not job.done.done():
            job.done.set_result(None)
        self._delivery_scheduled = False
        if self._finished_jobs:
            self._delivery_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver_one)
