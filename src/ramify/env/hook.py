"""Call a hook with exactly the arguments its signature names.

A hook `def solved(self, task, trace)` gets the task and the trace, in whatever order it names them. A misspelled
parameter must not surface in the middle of a run, so the signature is inspected once, when the `Hook` is created, and
an unknown parameter is refused there. A call then only looks up a few fields. A hook that is not async runs in a
thread, so that a blocking hook does not delay other rollouts.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from ramify.core.errors import ConfigInvalid
from ramify.core.names import find_similar
from ramify.env.context import CONTEXT_FIELDS, RolloutContext

CHECK_INTERVAL = 0.005  # seconds between two checks whether jobs wait for a busy thread
IDLE_TIMEOUT = 5.0  # seconds that the last thread waits for a job before it exits
MAX_THREADS = 64  # threads that run jobs
MAX_DETACHED_THREADS = 1024  # threads that may run cancelled jobs; further ones count towards MAX_THREADS
_threads_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, HookThreads]" = WeakKeyDictionary()
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


async def run_in_hook_thread(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of `function(**kwargs)`, called in a hook thread. An awaitable result is awaited here."""
    loop = asyncio.get_running_loop()
    threads = _threads_by_loop.get(loop)
    if threads is None:
        threads = _threads_by_loop[loop] = HookThreads()
    result = await threads.run(_HookJob(function, kwargs, loop.create_future()))
    return await result if _is_awaitable(result) else result


def _is_awaitable(value: object) -> bool:
    return hasattr(type(value), "__await__")  # much faster than `inspect.isawaitable`


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
    """The threads of one event loop: one by default, another whenever a job has waited too long for it.

    Most hooks return at once. With one thread per hook, waking the threads, which then wait for each other's
    interpreter lock, would cost several times more than the hooks. Each loop iteration delivers at most one result.

    A thread cannot be stopped from outside. If a job is cancelled while it runs, its thread no longer counts towards
    `MAX_THREADS` and exits when the job returns, so code that never returns cannot use up all threads.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_HookJob] = SimpleQueue()
        self._finished_jobs: deque[_HookJob] = deque()
        self._delivery_scheduled = False  # whether the loop will call `_deliver_one`
        self._new_jobs: list[_HookJob] = []  # queued since the last `_check_queue`
        self._waiting_jobs: list[_HookJob] = []  # had not started at the last `_check_queue`
        self._check_scheduled = False  # whether the loop will call `_check_queue`
        self._num_active = self._num_detached = 0
        self._lock = threading.Lock()

    async def run(self, job: _HookJob) -> Any:
        """Run a job and return its result. A job that is cancelled before it has started never starts."""
        self._jobs.put(job)
        if not self._num_active:
            self._start_thread()
        self._new_jobs.append(job)
        if not self._check_scheduled:
            self._schedule_check(job.done.get_loop())
        try:
            await job.done
        except asyncio.CancelledError:
            self._detach(job)
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_scheduled = True
        loop.call_later(CHECK_INTERVAL, self._check_queue)

    def _check_queue(self) -> None:
        """Start a thread for each job that waits since the last check. A timer for each job would cost much more."""
        for job in self._waiting_jobs:
            if not (job.started or job.done.done()) and self._num_active < MAX_THREADS:
                self._start_thread()
        self._waiting_jobs = [job for job in self._new_jobs if not job.started]
        self._new_jobs.clear()
        self._check_scheduled = False
        if self._waiting_jobs:
            self._schedule_check(asyncio.get_running_loop())

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

        If a job is queued at the moment the last thread exits, `_check_queue` starts another.
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


class Hook:
    """A function of the environment that is called with fields of a `RolloutContext`.

    `injected_parameters` are the fields that its signature names, `weight` is its weight if it is a reward.
    """

    __slots__ = ("function", "injected_parameters", "is_async", "name", "weight")

    def __init__(
        self,
        function: Callable[..., Any],
        owner: str,
        *,
        available: tuple[str, ...] = CONTEXT_FIELDS,
        weight: float = 1.0,
    ) -> None:
        self.function = function
        self.name: str = function.__name__
        self.weight = weight
        unbound = getattr(function, "__func__", function)  # a bound method is a new object on each access
        self.injected_parameters, self.is_async = _inspect_signature(unbound, unbound is not function, available, owner)

    async def __call__(self, context: RolloutContext, **extra: Any) -> Any:
        """Call the function with the parameters it names, taken from `extra` or else from the context."""
        kwargs = {name: extra[name] if name in extra else getattr(context, name) for name in self.injected_parameters}
        if self.is_async:
            return await self.function(**kwargs)
        return await run_in_hook_thread(self.function, kwargs)

    def __repr__(self) -> str:
        return f"Hook({self.name}: {', '.join(sorted(self.injected_parameters))})"


def is_current_task_cancelled() -> bool:
    """Return whether the current task itself is being cancelled.

    If it is not, a CancelledError comes from something that the task awaited.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def list_parameters(function: Callable[..., Any], *, bound: bool) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes. `bound`: leave out the first one, the `self` of a method."""
    return list(inspect.signature(function).parameters.values())[bound:]


@lru_cache(maxsize=4096)
def _inspect_signature(
    function: Callable[..., Any], bound: bool, available: tuple[str, ...], owner: str
) -> tuple[frozenset[str], bool]:
    """Return the available parameters that a function names, and whether it is async.

    Raises ConfigInvalid for a required parameter that is not available.
    """
    injected_parameters: set[str] = set()
    for parameter in list_parameters(function, bound=bound):
        if parameter.name in available and parameter.kind in _KEYWORD_KINDS:
            injected_parameters.add(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in _VARIADIC_KINDS:
            similar = find_similar(parameter.name, available)
            hint = f"did you mean {similar}? " if similar else ""
            raise ConfigInvalid(
                f"{owner}.{function.__name__}: unknown parameter {parameter.name!r}; "
                f"{hint}available parameters: {', '.join(available)}"
            )
    return frozenset(injected_parameters), is_coroutine_function(function)
