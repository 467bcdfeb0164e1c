"""One server (replica) of a client: its connections, its requests in flight whose progress is measured, its load."""

import asyncio
import re
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

from ramify.core.errors import ProviderError
from ramify.infer.client.engine_adapter import EngineAdapter
from ramify.infer.client.http_client import HttpClient, ResponseLost
from ramify.infer.client.stall_clock import StallClock
from ramify.processes.wire.server_pool import PooledServer

KV_USAGE_RE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_WAITING_RE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_RUNNING_RE = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)
SECONDS_RE = re.compile(r"^ramify_(ideal|sampling|training|swap|idle)_seconds(?:_total)? (\S+)$", re.MULTILINE)
NUM_STEPS_RE = re.compile(
    r"^(?:ramify_steps_total|vllm:iteration_tokens_total_count|vllm:generation_tokens_total)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


class EngineLoad(NamedTuple):
    """The share of the KV cache in use, and the numbers of waiting and running requests.

    `seconds` are totals by what the engine has spent its time on (`EngineActivity`); `ideal` is the least time that the
    device needs for all steps so far. What is unknown is missing.
    """

    kv_usage: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    seconds: Mapping[str, float] = {}


def parse_load(metrics: str) -> EngineLoad:
    """Parse the load from Prometheus text; a missing metric counts as 0."""
    kv_usage = max(map(float, KV_USAGE_RE.findall(metrics)), default=0.0)
    num_waiting, num_running = (
        int(sum(map(float, pattern.findall(metrics)))) for pattern in (NUM_WAITING_RE, NUM_RUNNING_RE)
    )
    seconds = {activity: float(total) for activity, total in SECONDS_RE.findall(metrics)}
    return EngineLoad(kv_usage, num_waiting, num_running, seconds)


def parse_num_steps(metrics: str) -> float | None:
    """Return a counter that grows with every step of the engine; None if its metrics have none."""
    counters = [float(value) for value in NUM_STEPS_RE.findall(metrics)]
    return sum(counters) if counters else None


class Replica(PooledServer):
    """One server.

    `adapter` is set when it first comes up; `last_num_steps` is the engine's step counter at the last health check.
    """

    def __init__(self, url: str, http: HttpClient) -> None:
        super().__init__(url)
        self.url, self.http = url, http
        self.adapter: EngineAdapter | None = None
        self.last_num_steps: float | None = None
        self.timed_requests: set[TimedRequest] = set()
        """The requests in flight whose clocks depend on this engine's progress."""

    def require_adapter(self) -> EngineAdapter:
        """Return the adapter, which every server that is up has. Raises ProviderError otherwise."""
        if self.adapter is None:
            raise ProviderError(f"{self.url} was never reached: {self.reason}")
        return self.adapter

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    def interrupt_movable_requests(self) -> None:
        """End the requests in flight that may be sent to another server, unless they are ending already."""
        for request in self.timed_requests:
            request.interrupt_if_movable()

    def record_progress(self) -> None:
        """Record in the clocks of all requests in flight that the engine makes progress."""
        for request in self.timed_requests:
            request.clock.record_progress()


class TimedRequest:
    """A block in which a request to `replica` is in flight, and `clock` gets the engine's progress.

    A `movable` request may be sent to another server: `interrupt_if_movable` ends the block with ResponseLost.
    """

    __slots__ = ("_is_movable", "_replica", "_scope", "clock")

    def __init__(self, replica: Replica, clock: StallClock, *, movable: bool) -> None:
        self._replica, self.clock, self._is_movable = replica, clock, movable
        self._scope = asyncio.Timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._replica.timed_requests.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._replica.timed_requests.remove(self)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as timeout_error:
            raise ResponseLost(f"{self._replica.url} failed its health checks") from timeout_error

    def interrupt_if_movable(self) -> None:
        """End the block if the request may be sent to another server, unless it is ending already."""
        if self._is_movable and self._scope.when() is None:
            self._scope.reschedule(asyncio.get_running_loop().time())
