"""What the requests of one rollout may hold and use at once, so that its agent cannot slow down other rollouts.

All rollouts of a process share its memory and its event loop. An agent may open many connections, send bodies slowly,
or let the gateway render and count long texts again and again. So all requests of a rollout share one quota: bytes in
flight, from the first byte of a body until the response is sent, and time for parsing, rendering and tokenizing. A
request over the bytes is refused; one over the time waits. The size of a text is checked before it is rendered, which
bounds the time of one piece of work: Python cannot end a thread.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ramify.errors import QuotaExceeded, RequestInvalid
from ramify.render.offload import offload

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    """The quota of one rollout."""

    max_bytes: int = 96 * 2**20
    """Most bytes of requests in flight: the history, and images in base64."""
    request_bytes: int = 2**18
    """What each request counts besides its body: the buffers of its connection."""
    cpu_share: float = 0.1
    """Seconds of work per second, in the long run."""
    cpu_burst: float = 5.0
    """Seconds of work that a rollout may use at once after a pause."""


class RequestQuota:
    """The quota of one rollout, and what its requests hold of it."""

    def __init__(self, settings: QuotaSettings) -> None:
        self.settings = settings
        self._held_bytes = 0
        self._cpu_seconds, self._updated_at = settings.cpu_burst, time.monotonic()
        self._thread_lock = asyncio.Lock()
        self._thread_work: asyncio.Future[Any] | None = None

    @contextlib.contextmanager
    def open_request(self) -> Generator[Callable[[int], None]]:
        """Count a request while the block runs; it calls the yielded function with the size of each part it reads.

        Raises RequestInvalid if the request alone is too large, QuotaExceeded if all requests of the rollout are.
        """
        max_bytes, body_bytes = self.settings.max_bytes, 0

        def hold(num_bytes: int) -> None:
            nonlocal body_bytes
            body_bytes += num_bytes
            self._held_bytes += num_bytes
            if body_bytes > max_bytes:
                raise RequestInvalid(f"the body is larger than {max_bytes} bytes; send fewer or smaller images")
            if self._held_bytes > max_bytes:
                raise QuotaExceeded(
                    f"the open requests of this rollout have more than {max_bytes} bytes together, their connections "
                    "included; send fewer requests at once, or smaller ones"
                )

        self._held_bytes += self.settings.request_bytes
        try:
            hold(0)
            yield hold
        finally:
            self._held_bytes -= self.settings.request_bytes + body_bytes

    async def run(self, is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` as `offload` does, once the rollout has time left; its large work runs one after another."""
        if not is_large:
            await self._wait_for_time()
            with self._charge_time():
                return function(*args, **kwargs)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._thread_lock)
            await self._wait_for_time()
            work = asyncio.ensure_future(self._run_in_thread(stack.pop_all(), function, *args, **kwargs))
        self._thread_work = work
        return await asyncio.shield(work)  # a cancelled caller must not start a second thread beside this one

    async def _run_in_thread(
        self, held: contextlib.AsyncExitStack, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        async with held:
            with self._charge_time():
                return await offload(True, function, *args, **kwargs)

    @contextlib.contextmanager
    def _charge_time(self) -> Generator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self._cpu_seconds -= time.monotonic() - started_at

    async def _wait_for_time(self) -> None:
        settings = self.settings
        while True:
            now = time.monotonic()
            earned = settings.cpu_share * (now - self._updated_at)
            self._cpu_seconds, self._updated_at = min(settings.cpu_burst, self._cpu_seconds + earned), now
            if self._cpu_seconds > 0:
                return
            await asyncio.sleep(max(0.001, -self._cpu_seconds / settings.cpu_share))
