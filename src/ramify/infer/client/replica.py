"""One server (replica) of a client: its connections, its requests in flight whose progress is measured, its load."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from ramify.core.errors import ProviderError
from ramify.infer.client.engine_adapter import EngineAdapter
from ramify.infer.client.http_client import HttpClient, ResponseLost
from ramify.infer.client.stall_clock import StallClock
from ramify.processes.wire.server_pool import PooledServer

KV_USAGE_RE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_WAITING_RE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_RUNNING_RE = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)
IDEAL_SECONDS_RE = re.compile(r"^ramify_ideal_seconds (\S+)$", re.MULTILINE)
NUM_STEPS_RE = re.compile(
    r"^(?:ramify_steps_total|vllm:iteration_tokens_total_count|vllm:generation_tokens_total)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


class EngineLoad(NamedTuple):
    """The share of the KV cache in use, and the numbers of waiting and running requests.

    `ideal_seconds` is the least time that the device needs for all steps so far; None if that is unknown.
    """

    kv_usage: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    ideal_seconds: float | None = None


def parse_load(metrics: str) -> EngineLoad:
    """Parse the load from Prometheus text; a missing metric counts as 0."""
    kv_usage = max(map(float, KV_USAGE_RE.findall(metrics)), default=0.0)
    num_waiting, num_running = (
        int(sum(map(float, pattern.findall(metrics)))) for pattern in (NUM_WAITING_RE, NUM_RUNNING_RE)
    )
    ideal_seconds = IDEAL_SECONDS_RE.search(metrics)
    return EngineLoad(kv_usage, num_waiting, num_running, float(ideal_seconds[1]) if ideal_seconds else None)


def parse_num_steps(metrics: str) -> float | None:
    """Return a counter that grows with every step of the engine; None if its metrics have none."""
    counters = [float(value) for value in NUM_STEPS_RE.findall(metrics)]
    return sum(counters) if counters else None


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequest:
    """A request in flight whose rollout measures how long the engine makes no progress."""

    clock: StallClock
    timeout: asyncio.Timeout | None
    """Expires to end the request, so that it can be sent to another server; None if it must not be sent twice."""


class Replica(PooledServer):
    """One server.

    `adapter` is set when it first comes up; `last_num_steps` is the engine's step counter at the last health check.
    """

    def __init__(self, url: str, http: HttpClient) -> None:
        super().__init__(url)
        self.url, self.http = url, http
        self.adapter: EngineAdapter | None = None
        self.last_num_steps: float | None = None
        self._timed_requests: set[TimedRequest] = set()

    def require_adapter(self) -> EngineAdapter:
        """Return the adapter, which every server that is up has. Raises ProviderError otherwise."""
        if self.adapter is None:
            raise ProviderError(f"{self.url} was never reached: {self.reason}")
        return self.adapter

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    @contextlib.asynccontextmanager
    async def timed_request(self, clock: StallClock, *, movable: bool) -> AsyncGenerator[None]:
        """Record the engine's progress in `clock` while a request is in flight.

        A `movable` request may be sent to another server: `interrupt_movable_requests` ends it with ResponseLost.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                request = TimedRequest(clock, timeout if movable else None)
                self._timed_requests.add(request)
                try:
                    yield
                finally:
                    self._timed_requests.remove(request)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise ResponseLost(f"{self.url} failed its health checks") from error

    @property
    def has_timed_requests(self) -> bool:
        """Whether the clock of a rollout depends on this engine's progress."""
        return bool(self._timed_requests)

    def interrupt_movable_requests(self) -> None:
        """End the requests in flight that may be sent to another server, unless they are ending already."""
        for request in self._timed_requests:
            if request.timeout is not None and request.timeout.when() is None:
                request.timeout.reschedule(asyncio.get_running_loop().time())

    def record_progress(self) -> None:
        """Record in the clocks of all requests in flight that the engine makes progress."""
        for request in self._timed_requests:
            request.clock.record_progress()
