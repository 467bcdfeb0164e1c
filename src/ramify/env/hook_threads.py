"""Threads for code that may block: one while that is enough, more as soon as it is not.

Most hooks are done in a moment. If each had a thread of its own, waking all of those threads, which then wait for each
other's interpreter lock, would cost several times what the hooks do. So one thread takes one job after the other, and
a job that nobody has begun after a few milliseconds, because the one before it blocks, brings another thread along.
A thread cannot be ended from outside. One whose job was given up counts no more, and leaves if it ever comes back: code
that never returns must not use up the threads of the code that does.
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

QUEUE_TIMEOUT = 0.005  # seconds a job waits for a thread that is busy
IDLE_TIMEOUT = 5.0  # seconds the last thread waits for a job
MAX_THREADS = 64  # threads that work
MAX_ABANDONED_THREADS = (
    1024  # threads that may stand still in code nobody waits for any more; further ones count as working
)

_threads_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, HookThreads]" = WeakKeyDictionary()


async def run_in_hook_thread(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The result of `function(**given)`, computed in a thread of the running loop; an awaitable one is awaited here."""
    loop = asyncio.get_running_loop()
    crew = _threads_by_loop.get(loop)
    if crew is None:
        crew = _threads_by_loop[loop] = HookThreads()
    result = await crew.run(_HookJob(function, kwargs, loop.create_future()))
    return await result if inspect.isawaitable(result) else result


class _HookJob:
    """A call, and what came of it once `over` is set."""

    __slots__ = ("abandoned", "context", "done", "error", "finished", "function", "kwargs", "result", "started")

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any], done: asyncio.Future[None]) -> None:
        self.function, self.kwargs, self.done = function, kwargs, done
        self.context = contextvars.copy_context()
        self.started = self.finished = self.abandoned = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        self.started = True
        if self.done.cancelled():
            return
        try:
            self.result = self.context.run(self.function, **self.kwargs)
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        except BaseException as error:  # noqa: BLE001 - `exit()` ends the code that says it, not the process around it
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.error = RuntimeError(text).with_traceback(error.__traceback__)


class HookThreads:
    """The threads of one event loop. Answers go back one in each round of the loop, so that no round gets long."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_HookJob] = SimpleQueue()
        self._finished_jobs: deque[_HookJob] = deque()
        self._delivery_scheduled = False  # whether the loop knows that there are answers
        self._num_active = self._num_abandoned = 0
        self._lock = threading.Lock()

    async def run(self, job: _HookJob) -> Any:
        """Have a job done; one that is cancelled before it has begun is never begun."""
        self._jobs.put(job)
        if not self._num_active:
            self._start_thread()
        timer = job.done.get_loop().call_later(QUEUE_TIMEOUT, self._start_thread_if_queued, job)
        try:
            await job.done
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        finally:
            timer.cancel()
        if job.error is not None:
            raise job.error
        return job.result

    def _start_thread_if_queued(self, job: _HookJob) -> None:
        if not job.started and self._num_active < MAX_THREADS:
            self._start_thread()

    def _abandon(self, job: _HookJob) -> None:
        with self._lock:
            if not job.started or job.finished or self._num_abandoned >= MAX_ABANDONED_THREADS:
                return
            job.abandoned = True
            self._num_active -= 1
            self._num_abandoned += 1
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
                self._num_abandoned -= job.abandoned
            if job.abandoned:
                return  # nobody waits for it, and its place is taken
            self._post_result(job)
            del job  # nothing is held while waiting

    def _next_job(self) -> _HookJob | None:
        """The next job. None for a thread that is not needed any more: all but one leave when nothing waits.

        A job that comes at the moment the last one leaves is found by `_look_after`.
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
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                job.done.get_loop().call_soon_threadsafe(self._deliver_one)

    def _deliver_one(self) -> None:
        """Hand one answer over, in the loop."""
        job = self._finished_jobs.popleft() if self._finished_jobs else None
        if job is not None and not job.done.done():
            job.done.set_result(None)
        self._delivery_scheduled = False
        if self._finished_jobs:
            self._delivery_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver_one)
