"""The servers (replicas) of a client, and routing among them.

    UP -> DOWN      health checks failed, a connection could not be made, or a weight update was not acknowledged
    DOWN -> UP      healthy again, and serving the same weights as the others
    any -> REMOVED  its address was removed from the list; requests in flight stay with it, and it never comes back

A session stays with its server while that is up, because the session's prefix is in the server's cache. Other requests
go to the server with the fewest requests of this client in flight.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Generator, Sequence
from dataclasses import dataclass

from ramify.core.errors import ProviderError, RamifyError
from ramify.infer.client.engine_adapter import EngineAdapter
from ramify.infer.client.http_client import HttpClient, ResponseLost
from ramify.infer.client.stall_clock import StallClock
from ramify.processes.wire.message import ServerState

MAX_SESSIONS = 1 << 16  # beyond it, the least recently used session is forgotten


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequest:
    """A request in flight whose rollout measures how long the engine makes no progress."""

    clock: StallClock
    timeout: asyncio.Timeout | None
    """Expires to end the request, so that it can be sent to another server; None if it must not be sent twice."""


class Replica:
    """One server: its connections, its state, and its requests in flight.

    `reason` says why it is down; `adapter` is set when it first comes up; `fatal_error` is a failure to join after
    which trying again is pointless; `num_failed_checks` counts failed health checks in a row; setting `check_now`
    triggers a health check; `last_num_steps` is the engine's step counter at the last health check.
    """

    def __init__(self, url: str, http: HttpClient) -> None:
        self.url, self.http = url, http
        self.state = ServerState.DOWN
        self.reason = "not reached yet"
        self.adapter: EngineAdapter | None = None
        self.fatal_error: RamifyError | None = None
        self.num_in_flight = 0
        self.num_served = 0
        self.num_failed_checks = 0
        self.check_now = asyncio.Event()
        self.last_num_steps: float | None = None
        self._timed_requests: set[TimedRequest] = set()

    def require_adapter(self) -> EngineAdapter:
        """Return the adapter, which every server that is up has. Raises ProviderError otherwise."""
        if self.adapter is None:
            raise ProviderError(f"{self.url} was never reached: {self.reason}")
        return self.adapter

    @property
    def is_drained(self) -> bool:
        """Whether it was removed and its last request has ended."""
        return self.state is ServerState.REMOVED and not self.num_in_flight

    @contextlib.contextmanager
    def track_request(self) -> Generator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
            self.num_served += 1
        finally:
            self.num_in_flight -= 1

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


class ReplicaPool:
    """All servers of a client. `is_closed` makes waiting requests fail."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self._session_replicas: OrderedDict[str, Replica] = OrderedDict()
        self._any_up, self._changed = asyncio.Event(), asyncio.Event()
        self.is_closed = False

    @property
    def up_replicas(self) -> list[Replica]:
        """The servers that receive requests."""
        return [replica for replica in self.replicas if replica.state is ServerState.UP]

    def add(self, replica: Replica) -> None:
        """Add a server. It gets requests once it is admitted."""
        self.replicas.append(replica)
        self.notify_change()

    def remove(self, replica: Replica) -> None:
        """Remove a server: it gets no more requests, and those in flight stay with it."""
        self.replicas.remove(replica)
        self._set_state(replica, ServerState.REMOVED, "its address was removed")
        replica.check_now.set()

    def eject(self, replica: Replica, reason: str) -> None:
        """Stop sending requests to a server until it is admitted again."""
        self._set_state(replica, ServerState.DOWN, reason)
        replica.check_now.set()

    def admit(self, replica: Replica) -> None:
        """Start sending requests to a server."""
        replica.num_failed_checks = 0
        self._set_state(replica, ServerState.UP, "")

    def _set_state(self, replica: Replica, state: ServerState, reason: str) -> None:
        if replica.state is not ServerState.REMOVED:
            replica.state, replica.reason = state, reason
        if self.up_replicas:
            self._any_up.set()
        else:
            self._any_up.clear()
        self.notify_change()

    def notify_change(self) -> None:
        """Wake up `wait_for_change`."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait until a server is added, removed, admitted, ejected or refused. Only one task may wait."""
        await self._changed.wait()
        self._changed.clear()

    def pick(self, session: str | None, avoid: Collection[Replica] = ()) -> Replica | None:
        """Return the server for a request: not one of `avoid` if there is another; None if none is up."""
        up = self.up_replicas
        candidates = [replica for replica in up if replica not in avoid] or up
        if not candidates:
            return None
        assigned = self._session_replicas.get(session) if session is not None else None
        if assigned in candidates:
            assert session is not None
            self._session_replicas.move_to_end(session)
            return assigned
        chosen = min(candidates, key=lambda replica: (replica.num_in_flight, replica.num_served))
        if session is not None and assigned not in up:
            self._session_replicas[session] = chosen
            if len(self._session_replicas) > MAX_SESSIONS:
                self._session_replicas.popitem(last=False)
        return chosen

    async def wait_for_replica(self, session: str | None, avoid: Collection[Replica], *, timeout: float) -> Replica:
        """Return the server that `pick` chooses; if none is up, wait up to `timeout` seconds for one.

        Raises ProviderError with the reason of each server if none came up.
        """
        while (replica := self.pick(session, avoid)) is None:
            if self.is_closed:
                raise ProviderError("the client is closed")
            try:
                async with asyncio.timeout(timeout):
                    await self._any_up.wait()
            except TimeoutError:
                raise ProviderError(f"no inference server is up after {timeout:g} s: {self.describe_down()}") from None
        return replica

    def describe_down(self) -> str:
        """Return the URL and the reason of each server that is down."""
        return "; ".join(f"{replica.url}: {replica.reason}" for replica in self.replicas if replica.reason)
