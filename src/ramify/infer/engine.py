"""The engine: a core in a thread of its own, used from asyncio.

Only the thread uses the core. New requests are put in a queue, which the thread reads between two steps. Everything
else that others want from it is a command: a function and a future, which the thread runs between two steps as well.
After a step the thread notifies the streams that have new tokens, with one call into each event loop, and they read
their requests. Requests are only ever appended to, so a reader needs no lock. Nothing waits forever: commands have
timeouts, requests have deadlines, and if the thread dies every stream fails with its error.
"""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ramify.core.errors import DeadlineExceeded, ProviderError, RamifyError, WeightsMissing
from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore, KVSwapMode
from ramify.infer.grammar import GrammarState
from ramify.infer.images import ImageReference
from ramify.infer.metrics import EngineActivity
from ramify.infer.request import EngineRequest, RequestOutput, SamplingParams
from ramify.infer.weight_loader import WeightLoader
from ramify.model.images import ProcessedImage
from ramify.model.load import load_engine_model
from ramify.model.lora import add_engine_adapters
from ramify.model.resolve import resolve_model_path
from ramify.model.shared_weights import MemoryUnreadable, hold_announced
from ramify.model.weights import StagedWeights
from ramify.model.weights_manifest import MANIFEST_FILE, verify_weights
from ramify.processes.training_lock import TrainingLock
from ramify.run.fencing.token import FencingToken, TokenGate
from ramify.trace.version import PolicyVersion

T = TypeVar("T")
COMMAND_TIMEOUT = 120.0  # seconds; a command waits for one step at most
STAGING_TIMEOUT = 600.0  # seconds that an update of the weights waits for another one to be staged
IDLE_WAIT_SECONDS = 0.2  # after which an idle thread checks the deadlines
LOCKED_IDLE_WAIT_SECONDS = 0.02  # the same if a trainer may take the GPU: until the next check, its time counts as idle
LOCK_POLL_INTERVAL = 0.002  # seconds between two checks of whether a trainer still computes on the GPU


class RequestStream:
    """The outputs of a request in an event loop: incrementally, or all of them at the end.

    `updated` is set when there is something to read.
    """

    def __init__(self, engine: "Engine", request: EngineRequest, *, incremental: bool) -> None:
        self.request = request
        self.incremental = incremental
        self.loop = asyncio.get_running_loop()
        self.updated = asyncio.Event()
        self._engine = engine
        self._num_read = 0

    async def iter_outputs(self) -> AsyncIterator[RequestOutput]:
        """Yield new tokens when there are some; the last output has a finish reason."""
        while True:
            await self.updated.wait()
            self.updated.clear()
            output = self._read_output()
            if output.token_ids or output.finish_reason:
                yield output
            if output.finish_reason:
                return

    async def result(self) -> RequestOutput:
        """Wait until the request has finished and return everything."""
        while self.request.finish_reason is None:
            await self.updated.wait()
            self.updated.clear()
        return self._read_output()

    def cancel(self) -> None:
        """Stop the request, unless it has finished."""
        if self.request.finish_reason is None:
            self._engine.cancel(self.request)

    def _read_output(self) -> RequestOutput:
        request, start = self.request, self._num_read
        finish_reason, error = request.finish_reason, request.error  # first: what is read after them is complete
        stop = len(request.logprobs)
        if error is not None:
            raise error
        self._num_read = stop
        prompt_length = len(request.prompt_token_ids)
        return RequestOutput(
            token_ids=request.token_ids[prompt_length + start : prompt_length + stop],
            logprobs=request.logprobs[start:stop],
            version_spans=_build_version_spans(request.version_starts, start, stop),
            finish_reason=finish_reason,
            top_logprobs=request.top_logprobs[start:stop],
            prompt_logprobs=request.prompt_logprobs if start == 0 else [],
            prompt_top_logprobs=request.prompt_top_logprobs if start == 0 else [],
            num_cached_tokens=request.num_cached_tokens,
        )


class Engine:
    """Owns the thread and the core in it. Start it once, close it once.

    `ended` completes when the thread ends, after a failure or `close`, and `failure` says why; `swap_seconds` is how
    long the last weight swap delayed decoding.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.paused = False
        self.failure: ProviderError | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # mark it running, so that cancelling a waiter does not cancel it
        self.swap_seconds = 0.0
        self._new_requests: deque[EngineRequest] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._streams: dict[EngineRequest, RequestStream] = {}
        self._staging_lock = threading.Lock()
        self._token_gates = defaultdict[str, TokenGate](lambda: TokenGate("trainer"))  # by run
        self._weight_loader = WeightLoader(
            core.model.module, core.config.weights_url, reads_memory=core.config.copy_from_trainer
        )
        self._training_lock = TrainingLock.from_environment()
        self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> "Engine":
        """Load the model `name` and return an engine that is not yet started."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = resolve_model_path(name)
        is_published = (path / MANIFEST_FILE).is_file()
        version = verify_weights(path).version if is_published else PolicyVersion(Path(name).name)

        adapters = config.adapters
        add = partial(add_engine_adapters, **adapters.model_dump()) if adapters is not None else None

        def build_core() -> EngineCore:
            model = load_engine_model(path, dtype=config.dtype, device=config.device, add_adapters=add)
            return EngineCore(model, config, version)

        return cls(_run_in_new_thread(build_core).result())

    def start(self) -> "Engine":
        """Start the thread."""
        self._thread.start()
        return self

    def close(self, timeout: float = 30.0) -> None:
        """End the thread; unfinished streams fail with ProviderError. Raises DeadlineExceeded."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine thread did not end within {timeout:.0f} s; a step is still running")

    # -- calls from other threads ------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        timeout: float | None = None,
        incremental: bool = False,
        images: Sequence[ImageReference] = (),
        grammar: GrammarState | None = None,
    ) -> RequestStream:
        """Queue a request and return its stream. Call it in an event loop.

        Raises RequestInvalid, ContextOverflow, ImageMissing, QueueFull, or ProviderError if the engine has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        request = self.core.create_request(
            prompt_token_ids,
            sampling_params,
            cache_salt=cache_salt,
            priority=priority,
            deadline=deadline,
            images=images,
            grammar=grammar,
        )
        self.core.check_capacity(num_arriving=len(self._new_requests))
        stream = RequestStream(self, request, incremental=incremental)

        with self._wakeup:
            if self.failure is not None or self._closing:
                raise self._closed_error()
            self._new_requests.append(request)
            self._streams[request] = stream
            self._wakeup.notify()
        return stream

    def upload_image(self, image: ProcessedImage) -> None:
        """Keep an image for the prompts that refer to it. Raises RequestInvalid. Thread-safe."""
        self.core.get_uploaded_images().add(image)

    def cancel(self, request: EngineRequest) -> None:
        """Stop a request; its stream ends with the finish reason `abort`. Thread-safe."""

        def cancel_and_notify() -> None:
            if request in self._streams:
                self.core.cancel(request)
                self._notify_streams([request])

        self._enqueue_command(cancel_and_notify)

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Stop stepping. Requests keep their state (`keep`) or are cancelled (`abort`); new ones wait."""

        def set_paused() -> None:
            self.paused = True
            if mode == "abort":
                unfinished = self.core.list_unfinished_requests()
                for request in unfinished:
                    self.core.cancel(request)
                self._notify_streams(unfinished)

        await self._run_command(set_paused)

    async def resume(self) -> None:
        """Continue stepping."""

        def clear_paused() -> None:
            self.paused = False

        await self._run_command(clear_paused)

    async def update_weights(
        self, directory: Path, kv_mode: KVSwapMode = "recompute", *, run: str = ""
    ) -> PolicyVersion:
        """Swap in published weights between two steps, from the trainer's memory or from their directory.

        A directory is read and verified while the engine runs. A copy from the trainer's memory is verified afterwards:
        if it broke off, the engine has no weights, and the directory is loaded instead. Raises ProcessReplaced if
        weights of a newer trainer of the same run were applied before, and WeightsMissing if the engine has no weights.
        """

        def stage(reason: str) -> StagedWeights:
            if not self._staging_lock.acquire(timeout=STAGING_TIMEOUT):
                raise DeadlineExceeded(f"another version was not staged within {STAGING_TIMEOUT:g} s: {directory}")
            try:
                return self._weight_loader.stage(directory, run, directory_reason=reason)
            finally:
                self._staging_lock.release()

        async def stage_and_swap(reason: str = "") -> PolicyVersion:
            try:
                staged = await asyncio.wrap_future(_run_in_new_thread(partial(stage, reason)))
            except Exception:
                self.core.counters.swaps_refused += 1
                raise

            def swap() -> None:
                start = time.perf_counter()
                self._check_trainer(run, staged.version)
                with hold_announced(directory) if staged.checksum is not None else nullcontext():
                    self.core.swap_weights(staged, kv_mode)
                self.swap_seconds = time.perf_counter() - start

            await self._run_command(swap)
            return staged.version

        try:
            return await stage_and_swap()
        except (MemoryUnreadable, WeightsMissing) as error:
            self.core.counters.swaps_refused += 1
            reason = str(error)
        try:
            return await stage_and_swap(reason)
        except RamifyError as error:
            if self.core.has_weights:
                raise
            raise WeightsMissing(f"{reason}; {error.name}: {error.message}") from error

    def _check_trainer(self, run: str, version: PolicyVersion) -> None:
        """Raise ProcessReplaced if the trainer of these weights was replaced; call it in the engine's thread."""
        if run:  # otherwise a person updates the weights
            self._token_gates[run].check(FencingToken.from_number(version.incarnation))

    def format_metrics(self) -> str:
        """Return counters and gauges in the Prometheus text format."""
        gauges = {**self.core.gauges(), "paused": float(self.paused), "last_swap_seconds": self.swap_seconds}
        return self.core.counters.to_prometheus(gauges)

    async def _run_command(self, function: Callable[[], T]) -> T:
        future = asyncio.wrap_future(self._enqueue_command(function))
        try:
            return await asyncio.wait_for(future, COMMAND_TIMEOUT)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine thread ran no command for {COMMAND_TIMEOUT:.0f} s") from error

    def _enqueue_command(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._wakeup:
            if self.failure is not None or self._closing:
                future.set_exception(self._closed_error())
                return future
            self._commands.append((function, future))
            self._wakeup.notify()
        return future

    def _closed_error(self) -> ProviderError:
        return self.failure or ProviderError("the engine is closing")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # BLAS counts per thread, and operators in C call it directly
        try:
            last_time = time.monotonic()

            def count_time(activity: EngineActivity) -> None:
                nonlocal last_time
                now = time.monotonic()
                self.core.counters.add_seconds(activity, now - last_time)
                last_time = now

            while not self._closing:
                self._drain_queues()
                if self._staging_lock.acquire(blocking=False):
                    self._weight_loader.unmap_if_trainer_ended()
                    self._staging_lock.release()
                count_time("swap")
                is_training = self._training_lock.should_wait()
                is_waiting = is_training or self.paused or not self.core.has_weights
                if self.core.has_unfinished_requests and not is_waiting:
                    self._notify_streams(self.core.step())
                    count_time("sampling")
                else:
                    self._notify_streams(self.core.expire_requests() + self.core.flush_outputs())
                    idle_wait = LOCKED_IDLE_WAIT_SECONDS if self._training_lock.exists else IDLE_WAIT_SECONDS
                    with self._wakeup:
                        if not self._new_requests and not self._commands and not self._closing:
                            self._wakeup.wait(LOCK_POLL_INTERVAL if is_training else idle_wait)
                    count_time("training" if is_training else "idle")
            self._fail_all(ProviderError("the engine was closed"))
        except Exception as error:  # noqa: BLE001 - every stream has to get the error, whatever it is
            failure = ProviderError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail_all(failure)
        finally:
            self.ended.set_result(None)

    def _drain_queues(self) -> None:
        """Enqueue new requests, then run the commands that were pending before that, so that a command sees every
        request submitted before it."""
        num_commands = len(self._commands)
        while self._new_requests:
            self.core.enqueue(self._new_requests.popleft())
        for _ in range(num_commands):
            function, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it is raised in the caller of the command
                future.set_exception(error)

    def _notify_streams(self, requests: Sequence[EngineRequest]) -> None:
        """Notify the streams of these requests, with one call into each event loop."""
        streams_by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for request in requests:
            stream = self._streams.get(request)
            if stream is None or not (stream.incremental or request.finish_reason):
                continue
            if request.finish_reason:
                del self._streams[request]
            streams_by_loop.setdefault(stream.loop, []).append(stream)
        for loop, streams in streams_by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set_updated, streams)

    def _fail_all(self, failure: ProviderError) -> None:
        with self._wakeup:
            self.failure = failure
            pending_commands = list(self._commands)
            self._commands.clear()
        for _, future in pending_commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        unfinished = list(self._streams)
        for request in unfinished:
            request.error = failure
            request.finish_reason = request.finish_reason or "abort"
        self._notify_streams(unfinished)


def _run_in_new_thread(function: Callable[[], T]) -> "Future[T]":
    """Run a function in a thread that ends with it.

    Torch keeps worker threads for every thread that has computed. If there are more of them than cores, idle workers no
    longer spin but sleep, and each product of the engine would have to wake its own.
    """
    executor = ThreadPoolExecutor(1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def _set_updated(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.updated.set()


def _build_version_spans(
    version_starts: list[tuple[PolicyVersion, int]], start: int, stop: int
) -> list[tuple[PolicyVersion, int]]:
    """Return the versions that sampled tokens [start, stop), each with its number of tokens."""
    ends = [first for _, first in version_starts[1:]]
    runs = [
        (version, min(end, stop) - max(first, start)) for (version, first), end in zip(version_starts, [*ends, stop])
    ]
    return [(version, count) for version, count in runs if count > 0]
