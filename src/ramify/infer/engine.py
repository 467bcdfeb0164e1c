"""The engine: a core in a thread of its own, spoken to from asyncio.

The thread is the only one that touches the core. Requests are left at its door and taken in between two steps. Whatever
else others want from it is a command: a function and a future, carried out then as well. What it has for others is
news: after a step it wakes the streams that have some, one call into each event loop per step, and they read their
requests. Requests are only ever appended to, so a reader needs no lock. Nothing here waits without an end: commands
have deadlines, requests have deadlines, and a thread that dies takes every stream with it by name.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ramify.errors import DeadlineExceeded, ProviderError
from ramify.infer.config import EngineConfig
from ramify.infer.core import KV, Core
from ramify.infer.request import Completion, Request, Sampling
from ramify.model.load import load_model
from ramify.model.manifest import MANIFEST_FILE, verify_weights
from ramify.model.resolve import resolve_model_path
from ramify.model.version import PolicyVersion
from ramify.model.weights import stage_weights

T = TypeVar("T")
COMMAND_DEADLINE = 120.0  # seconds; a command waits for one step at most
IDLE_WAIT = 0.2  # seconds after which an idle thread looks at the deadlines


class Stream:
    """A request seen from an event loop: its tokens as they come, or all of them at the end."""

    def __init__(self, engine: "Engine", request: Request, *, incremental: bool) -> None:
        self.request = request
        self.incremental = incremental
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self._engine = engine
        self._seen = 0

    async def parts(self) -> AsyncIterator[Completion]:
        """New tokens whenever there are some; the last part has a finish reason."""
        while True:
            await self.news.wait()
            self.news.clear()
            part = self._read()
            if part.tokens or part.finish:
                yield part
            if part.finish:
                return

    async def result(self) -> Completion:
        """Everything, when it has finished."""
        while self.request.finish is None:
            await self.news.wait()
            self.news.clear()
        return self._read()

    def cancel(self) -> None:
        """Stop computing; nothing happens if it has finished."""
        if self.request.finish is None:
            self._engine.cancel(self.request)

    def _read(self) -> Completion:
        request, start = self.request, self._seen
        finish, error = request.finish, request.error  # first: what follows is then complete
        stop = len(request.logprobs)
        if error is not None:
            raise error
        self._seen = stop
        begin = len(request.prompt)
        return Completion(
            tokens=request.tokens[begin + start : begin + stop],
            logprobs=request.logprobs[start:stop],
            versions=_runs(request.versions, start, stop),
            finish=finish,
            top=request.top[start:stop],
            prompt_logprobs=request.prompt_logprobs if start == 0 else [],
            prompt_top=request.prompt_top if start == 0 else [],
            cached=request.cached,
        )


class Engine:
    """Owns the thread and the core in it. Start it once, close it once."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.paused = False
        self.failure: ProviderError | None = None
        self.swap_seconds = 0.0  # how long the last weight swap held up decoding
        self._arrivals: deque[Request] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._streams: dict[Request, Stream] = {}
        self._staging = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> "Engine":
        """An engine for the model `name`, not yet started."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = resolve_model_path(name)
        published = (path / MANIFEST_FILE).is_file()
        version = verify_weights(path).version if published else PolicyVersion(Path(name).name)

        def core() -> Core:
            return Core(load_model(path, dtype=config.dtype, device=config.device), config, version)

        return cls(_aside(core).result())

    def start(self) -> "Engine":
        """Start the thread."""
        self._thread.start()
        return self

    def close(self, deadline: float = 30.0) -> None:
        """End the thread; streams that have not finished fail by name."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine thread did not end within {deadline:.0f} s; a step is still running")

    # -- what others ask ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        salt: str = "",
        priority: int = 0,
        timeout: float | None = None,
        incremental: bool = False,
    ) -> Stream:
        """Queue a request. Raises at once what is wrong with it, or QueueFull. To be called from an event loop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        request = self.core.request(prompt, sampling, salt=salt, priority=priority, deadline=deadline)
        self.core.make_sure_of_room(arriving=len(self._arrivals))
        stream = Stream(self, request, incremental=incremental)

        with self._wakeup:
            if self.failure is not None or self._closing:
                raise self._over()
            self._arrivals.append(request)
            self._streams[request] = stream
            self._wakeup.notify()
        return stream

    def cancel(self, request: Request) -> None:
        """Stop a request; its stream ends with the finish reason `abort`. Safe from any thread."""

        def stop() -> None:
            if request in self._streams:
                self.core.cancel(request)
                self._deliver([request])

        self._command(stop)

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Stop stepping. Requests stay where they are (`keep`) or are cancelled (`abort`); new ones wait."""

        def hold() -> None:
            self.paused = True
            if mode == "abort":
                everyone = self.core.everyone()
                for request in everyone:
                    self.core.cancel(request)
                self._deliver(everyone)

        await self._ask(hold)

    async def resume(self) -> None:
        """Go on."""

        def go() -> None:
            self.paused = False

        await self._ask(go)

    async def update_weights(self, directory: Path, kv: KV = "recompute") -> PolicyVersion:
        """Verify the published weights beside the running engine, then swap them in between two steps."""

        def prepare() -> Any:
            with self._staging:
                return stage_weights(directory, self.core.model.module)

        try:
            staged = await asyncio.wrap_future(_aside(prepare))
        except Exception:
            self.core.counters.swaps_refused += 1
            raise

        def swap() -> None:
            start = time.perf_counter()
            self.core.swap(staged, kv)
            self.swap_seconds = time.perf_counter() - start

        await self._ask(swap)
        return staged.version

    def metrics(self) -> str:
        """Counters and gauges, as Prometheus reads them."""
        gauges = {**self.core.gauges(), "paused": float(self.paused), "last_swap_seconds": self.swap_seconds}
        return self.core.counters.text(gauges)

    async def _ask(self, function: Callable[[], T]) -> T:
        future = asyncio.wrap_future(self._command(function))
        try:
            return await asyncio.wait_for(future, COMMAND_DEADLINE)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine thread ran no command for {COMMAND_DEADLINE:.0f} s") from error

    def _command(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._wakeup:
            if self.failure is not None or self._closing:
                future.set_exception(self._over())
                return future
            self._commands.append((function, future))
            self._wakeup.notify()
        return future

    def _over(self) -> ProviderError:
        return self.failure or ProviderError("the engine is closing")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._carry_out()
                if self.core.busy and not self.paused:
                    self._deliver(self.core.step())
                else:
                    self._deliver(self.core.expire())
                    with self._wakeup:
                        if not self._arrivals and not self._commands and not self._closing:
                            self._wakeup.wait(IDLE_WAIT)
            self._end(ProviderError("the engine was closed"))
        except Exception as error:  # noqa: BLE001 - whatever it was, every stream has to hear of it
            failure = ProviderError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _carry_out(self) -> None:
        """Take what has arrived, then do as told: a command is about requests that were there before it."""
        commands = len(self._commands)
        while self._arrivals:
            self.core.enqueue(self._arrivals.popleft())
        for _ in range(commands):
            function, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                future.set_exception(error)

    def _deliver(self, requests: Sequence[Request]) -> None:
        """Wake the streams of these requests, with one call into each event loop."""
        awake: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for request in requests:
            stream = self._streams.get(request)
            if stream is None or not (stream.incremental or request.finish):
                continue
            if request.finish:
                del self._streams[request]
            awake.setdefault(stream.loop, []).append(stream)
        for loop, streams in awake.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, streams)

    def _end(self, failure: ProviderError) -> None:
        with self._wakeup:
            self.failure = failure
            pending = list(self._commands)
            self._commands.clear()
        for _, future in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        orphans = list(self._streams)
        for request in orphans:
            request.error = failure
            request.finish = request.finish or "abort"
        self._deliver(orphans)


def _aside(work: Callable[[], T]) -> "Future[T]":
    """Work in a thread that ends with it.

    Torch keeps helpers for every thread it has computed in. Where there are more of them than cores they no longer wait
    for work but go to sleep, and each product of the engine would have to wake its own.
    """
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def _wake(streams: list[Stream]) -> None:
    for stream in streams:
        stream.news.set()


def _runs(versions: list[tuple[PolicyVersion, int]], start: int, stop: int) -> list[tuple[PolicyVersion, int]]:
    """How many of the sampled tokens [start, stop) each version is for."""
    ends = [begin for _, begin in versions[1:]]
    runs = [(version, min(end, stop) - max(begin, start)) for (version, begin), end in zip(versions, [*ends, stop])]
    return [(version, count) for version, count in runs if count > 0]
