"""The servers behind a client, and the choice among them.

    UP -> DOWN   health checks failed, a connection could not be made, or a weight update was not acknowledged
    DOWN -> UP   healthy again, and serving the weights that the others serve

A session stays with its server while that is up, because the server has the session's prefix in its cache. Everybody
else goes where the fewest requests of ours are in flight.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ramify.client.control import Dialect
from ramify.client.http import Connections, Lost
from ramify.client.stall import StallClock
from ramify.errors import ProviderError

SESSIONS = 1 << 16  # sessions whose server is remembered


class State(Enum):
    """Whether a server gets requests."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequest:
    """A request in flight whose rollout does not count the time in which the engine makes no progress."""

    clock: StallClock
    scope: asyncio.Timeout | None
    """Ends the request so that it can be sent to another server; None if it must not be sent twice."""


class Replica:
    """One server: its connections, its state, and what is in flight there."""

    def __init__(self, url: str, http: Connections) -> None:
        self.url, self.http = url, http
        self.state = State.DOWN
        self.reason = "not reached yet"  # why it is down
        self.dialect: Dialect | None = None  # known once it has been up
        self.in_flight = 0
        self.served = 0
        self.failures = 0  # health checks in a row
        self.ejections = 0
        self.look = asyncio.Event()  # set to have its health looked at now
        self.steps: float | None = None  # the engine's counter when it was last read
        self._timed: set[TimedRequest] = set()  # those in flight

    @property
    def spoken(self) -> Dialect:
        """Its dialect; a server that is up has one."""
        if self.dialect is None:
            raise ProviderError(f"{self.url} was never reached: {self.reason}")
        return self.dialect

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Counts a request while it is in flight."""
        self.in_flight += 1
        try:
            yield
            self.served += 1
        finally:
            self.in_flight -= 1

    @contextlib.asynccontextmanager
    async def timed_request(self, clock: StallClock, *, movable: bool) -> AsyncIterator[None]:
        """Record the engine's progress in `clock` while a request is in flight.

        A `movable` request may be sent to another server: it ends with Lost when `release_requests` is called.
        """
        try:
            async with asyncio.timeout(None) as scope:
                request = TimedRequest(clock, scope if movable else None)
                self._timed.add(request)
                try:
                    yield
                finally:
                    self._timed.remove(request)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Lost(f"{self.url} failed its health checks, and another server is up") from error

    @property
    def has_timed_requests(self) -> bool:
        """Whether the clock of a rollout depends on this engine's progress."""
        return bool(self._timed)

    def release_requests(self) -> None:
        """End the requests in flight that may be sent to another server."""
        for request in self._timed:
            if request.scope is not None:
                request.scope.reschedule(asyncio.get_running_loop().time())

    def record_progress(self) -> None:
        """Tell the clocks of all requests in flight that the engine makes progress."""
        for request in self._timed:
            request.clock.record_progress()


class Pool:
    """All servers of a client."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._some_up = asyncio.Event()
        self.closed = False

    @property
    def up(self) -> list[Replica]:
        """The servers that get requests."""
        return [replica for replica in self.replicas if replica.state is State.UP]

    def eject(self, replica: Replica, reason: str) -> None:
        """Send a server nothing more until it is healthy again."""
        if replica.state is State.UP:
            replica.ejections += 1
        replica.state, replica.reason = State.DOWN, reason
        replica.look.set()
        if not self.up:
            self._some_up.clear()

    def admit(self, replica: Replica) -> None:
        """Send a server requests."""
        replica.state, replica.reason, replica.failures = State.UP, "", 0
        self._some_up.set()

    def pick(self, session: str | None, avoid: Collection[Replica] = ()) -> Replica | None:
        """The server for a request: not one of `avoid` if there is another; None if none is up."""
        up = self.up
        candidates = [replica for replica in up if replica not in avoid] or up
        if not candidates:
            return None
        home = self._homes.get(session) if session is not None else None
        if home in candidates:
            assert session is not None
            self._homes.move_to_end(session)
            return home
        chosen = min(candidates, key=lambda replica: (replica.in_flight, replica.served))
        if session is not None and home not in up:
            self._homes[session] = chosen
            if len(self._homes) > SESSIONS:
                self._homes.popitem(last=False)
        return chosen

    async def choose(self, session: str | None, avoid: Collection[Replica], *, patience: float) -> Replica:
        """As `pick`, but waits for a server to come up; after `patience` seconds the failure names them all."""
        while (replica := self.pick(session, avoid)) is None:
            if self.closed:
                raise ProviderError("the client is closed")
            try:
                async with asyncio.timeout(patience):
                    await self._some_up.wait()
            except TimeoutError:
                raise ProviderError(f"no inference server is up after {patience:g} s: {self.reasons()}") from None
        return replica

    def reasons(self) -> str:
        """Why each server that is down is down."""
        return "; ".join(f"{replica.url}: {replica.reason}" for replica in self.replicas if replica.reason)
