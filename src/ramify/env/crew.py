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

PATIENCE = 0.005  # seconds a job waits for a thread that is busy
IDLE = 5.0  # seconds the last thread waits for a job
MOST = 64  # threads that work
LOST = 1024  # threads that may stand still in code nobody waits for any more; further ones count as working

_crews: "WeakKeyDictionary[asyncio.AbstractEventLoop, Crew]" = WeakKeyDictionary()


async def in_thread(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of `function(**given)`, computed in a thread of the running loop; an awaitable one is awaited here."""
    loop = asyncio.get_running_loop()
    crew = _crews.get(loop)
    if crew is None:
        crew = _crews[loop] = Crew()
    result = await crew.run(_Job(function, given, loop.create_future()))
    return await result if inspect.isawaitable(result) else result


class _Job:
    """A call, and what came of it once `over` is set."""

    __slots__ = ("begun", "context", "ended", "error", "function", "given", "given_up", "over", "result")

    def __init__(self, function: Callable[..., Any], given: dict[str, Any], over: asyncio.Future[None]) -> None:
        self.function, self.given, self.over = function, given, over
        self.context = contextvars.copy_context()
        self.begun = self.ended = self.given_up = False
        self.result: Any = None
        self.error: Exception | None = None

    def do(self) -> None:
        self.begun = True
        if self.over.cancelled():
            return
        try:
            self.result = self.context.run(self.function, **self.given)
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        except BaseException as error:  # noqa: BLE001 - `exit()` ends the code that says it, not the process around it
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.error = RuntimeError(text).with_traceback(error.__traceback__)


class Crew:
    """The threads of one event loop. Answers go back one in each round of the loop, so that no round gets long."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._done: deque[_Job] = deque()
        self._telling = False  # whether the loop knows that there are answers
        self._threads = self._lost = 0
        self._counting = threading.Lock()

    async def run(self, job: _Job) -> Any:
        """Have a job done; one that is cancelled before it has begun is never begun."""
        self._jobs.put(job)
        if not self._threads:
            self._hire()
        late = job.over.get_loop().call_later(PATIENCE, self._look_after, job)
        try:
            await job.over
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        finally:
            late.cancel()
        if job.error is not None:
            raise job.error
        return job.result

    def _look_after(self, job: _Job) -> None:
        if not job.begun and self._threads < MOST:
            self._hire()

    def _give_up(self, job: _Job) -> None:
        with self._counting:
            if not job.begun or job.ended or self._lost >= LOST:
                return
            job.given_up = True
            self._threads -= 1
            self._lost += 1
        if not self._jobs.empty() and self._threads < MOST:
            self._hire()

    def _hire(self) -> None:
        with self._counting:
            self._threads += 1
        threading.Thread(target=self._work, name="hook", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.do()
            with self._counting:
                job.ended = True
                self._lost -= job.given_up
            if job.given_up:
                return  # nobody waits for it, and its place is taken
            self._tell(job)
            del job  # nothing is held while waiting

    def _next(self) -> _Job | None:
        """The next job. None for a thread that is not needed any more: all but one leave when nothing waits.

        A job that comes at the moment the last one leaves is found by `_look_after`.
        """
        try:
            return self._jobs.get_nowait() if self._threads > 1 else self._jobs.get(timeout=IDLE)
        except Empty:
            with self._counting:
                self._threads -= 1
            return None

    def _tell(self, job: _Job) -> None:
        self._done.append(job)
        if not self._telling:
            self._telling = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                job.over.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Hand one answer over, in the loop."""
        job = self._done.popleft() if self._done else None
        if job is not None and not job.over.done():
            job.over.set_result(None)
        self._telling = False
        if self._done:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._deliver)
