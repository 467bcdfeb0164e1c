"""What the requests of one rollout may hold and use at once, so that its agent cannot slow down other rollouts.

All rollouts of a process share its memory and its event loop. An agent may open many connections, send bodies slowly,
or let the gateway render and count long texts again and again. So all requests of a rollout share one quota: a number
of requests, bytes of their bodies until the response is sent, and time for parsing, rendering and tokenizing. Too many
requests are refused; a body or a piece of work for which there is no room waits. The size of a text is checked before
it is rendered, which bounds the time of one piece of work: Python cannot end a thread. All rollouts of a gateway also
share the characters that are rendered at once, because a tokenizer needs up to 256 bytes of memory for a character.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ramify.core.errors import QuotaExceeded, RequestInvalid
from ramify.model.render.tokenizer import offload

P = ParamSpec("P")
T = TypeVar("T")
MAX_RENDERED_CHARS = 2 * 2**20  # at once, by all rollouts of a gateway


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    """The quota of one rollout."""

    max_requests: int = 256
    """Most open requests. Each has a connection, whose buffers need memory before its body is read."""
    max_bytes: int = 96 * 2**20
    """Most bytes of the bodies of open requests: the history, and images in base64."""
    max_image_bytes: int = 64 * 2**20
    """Most bytes of the images of all requests."""
    cpu_share: float = 0.1
    """Seconds of work per second, in the long run."""
    cpu_burst: float = 15.0
    """Seconds of work that a rollout may use at once after a pause: 32 new prompts of 200,000 tokens."""


class SharedCapacity:
    """An amount of memory that several pieces of work share. One for which there is no room waits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._released = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, amount: int) -> AsyncGenerator[None]:
        """Hold an amount while the block runs. Small amounts may overtake; one over the limit is held alone."""
        while self._held and self._held + amount > self._limit:
            self._released.clear()
            await self._released.wait()
        self._held += amount
        try:
            yield
        finally:
            self._held -= amount
            self._released.set()


class RequestQuota:
    """The quota of one rollout, and what its requests hold of it."""

    def __init__(self, settings: QuotaSettings) -> None:
        self.settings = settings
        self.rendered_chars = SharedCapacity(MAX_RENDERED_CHARS)
        """The characters that are rendered at once. A gateway sets the capacity that all its rollouts share."""
        self._num_requests = 0
        self._body_bytes = SharedCapacity(settings.max_bytes)
        self._unknown_length_lock = asyncio.Lock()
        self._cpu_seconds, self._updated_at = settings.cpu_burst, time.monotonic()
        self._thread_lock = asyncio.Lock()
        self._thread_work: asyncio.Future[Any] | None = None

    @contextlib.contextmanager
    def open_request(self) -> Generator[None]:
        """Count a request while the block runs. Raises QuotaExceeded if the rollout has too many."""
        if self._num_requests >= self.settings.max_requests:
            raise QuotaExceeded(
                f"this rollout has {self._num_requests} open requests, the most that are allowed; send fewer at once"
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def read_body(
        self, parts: AsyncIterable[bytes], num_bytes: int | None, held: contextlib.AsyncExitStack
    ) -> bytearray:
        """Read a body once there is room for it; its bytes count until `held` is closed.

        Bodies of unknown length (`num_bytes` is None) are read one after another. Raises RequestInvalid if the body is
        too large.
        """
        if num_bytes is not None:
            self._check_body_bytes(num_bytes)
            await held.enter_async_context(self._body_bytes.hold(num_bytes))
            return await self._read(parts)
        async with self._unknown_length_lock:
            body = await self._read(parts)
            await held.enter_async_context(self._body_bytes.hold(len(body)))
            return body

    async def _read(self, parts: AsyncIterable[bytes]) -> bytearray:
        body = bytearray()
        async for part in parts:
            self._check_body_bytes(len(body) + len(part))
            body += part
        return body

    def _check_body_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.settings.max_bytes:
            max_bytes = self.settings.max_bytes
            raise RequestInvalid(f"the body is larger than {max_bytes} bytes; send fewer or smaller images")

    async def run(
        self, is_large: bool, num_chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `function` as `offload` does, once the rollout has time left; its large work runs one after another.

        - `num_chars`: the characters that large work renders; it waits until the process has room for them.
        """
        if not is_large:
            await self._wait_for_time()
            started_at = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._cpu_seconds -= time.thread_time() - started_at
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._thread_lock)
            await self._wait_for_time()
            await stack.enter_async_context(self.rendered_chars.hold(num_chars))
            work = asyncio.ensure_future(self._run_in_thread(stack.pop_all(), function, *args, **kwargs))
        self._thread_work = work
        return await asyncio.shield(work)  # a cancelled caller must not start a second thread beside this one

    async def _run_in_thread(
        self, held: contextlib.AsyncExitStack, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        cpu_seconds = 0.0

        def run_function() -> T:
            nonlocal cpu_seconds
            started_at = time.thread_time()  # waiting for a core or for Python's lock is not work
            try:
                return function(*args, **kwargs)
            finally:
                cpu_seconds = time.thread_time() - started_at

        async with held:
            try:
                return await offload(True, run_function)
            finally:
                self._cpu_seconds -= cpu_seconds

    async def _wait_for_time(self) -> None:
        settings = self.settings
        while True:
            now = time.monotonic()
            earned = settings.cpu_share * (now - self._updated_at)
            self._cpu_seconds, self._updated_at = min(settings.cpu_burst, self._cpu_seconds + earned), now
            if self._cpu_seconds > 0:
                return
            await asyncio.sleep(max(0.001, -self._cpu_seconds / settings.cpu_share))
