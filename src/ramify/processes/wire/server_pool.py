"""The servers at a list of addresses that may change: which of them get requests. Importable without ZMQ.

    DOWN -> UP       a check found that it can get requests
    UP -> DOWN       a check or a request failed
    any -> REMOVED   its address was removed from the list; requests in flight stay with it, and it never comes back

The client of inference servers and the env servers of a source are such pools; each says how a server is checked.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Collection, Generator, Sequence
from enum import Enum
from typing import Generic, Self, TypeVar

from ramify.core.async_calls import AsyncService, cancel_all, wait_for_event
from ramify.core.errors import ProviderError, RamifyError

JOIN_INTERVAL = 0.1  # seconds between two checks of a server that was never up
STRAGGLER_TIMEOUT = 10.0  # seconds for further servers to come up once one is up
MAX_SESSIONS = 1 << 16  # beyond it, the least recently used session is forgotten


class ServerState(Enum):
    """Whether a server receives requests."""

    UP = "up"
    DOWN = "down"
    REMOVED = "removed"


class PooledServer:
    """A server of a pool.

    `failure` says why it is down, `is_broken` that it will not come up by itself; `num_failed_checks` counts failed
    checks in a row; setting `check_now` triggers a check.
    """

    def __init__(self, address: str) -> None:
        self.address, self.state = address, ServerState.DOWN
        self.failure: RamifyError | None = None
        self.was_up = self.is_broken = False
        self.num_in_flight = self.num_served = self.num_failed_checks = 0
        self.check_now = asyncio.Event()

    @property
    def is_drained(self) -> bool:
        """Whether it was removed and its last request has ended."""
        return self.state is ServerState.REMOVED and not self.num_in_flight

    @property
    def is_expected_soon(self) -> bool:
        """Whether it was never up, and nothing is known that keeps it from coming up."""
        return not self.was_up and (self.failure is None or self.failure.retryable)

    @property
    def reason(self) -> str:
        """Why it is down."""
        return "not reached yet" if self.failure is None else f"{self.failure.name}: {self.failure.message}"

    @contextlib.contextmanager
    def track_request(self) -> Generator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
            self.num_served += 1
        finally:
            self.num_in_flight -= 1
            if self.is_drained:
                self.check_now.set()

    async def close(self) -> None:
        """Close its connections."""
        raise NotImplementedError


S = TypeVar("S", bound=PooledServer)


class ServerPool(AsyncService, Generic[S]):
    """Servers that are watched from `start` to `close`.

    A subclass says how a server is made, checked, and reported. A server that is up is checked every `check_interval`
    seconds, and is ejected after `eject_after` failed checks in a row. `start` waits up to `start_timeout` seconds for
    a server, and then up to `straggler_timeout` seconds for the others.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        start_timeout: float,
        check_interval: float,
        eject_after: int = 1,
        straggler_timeout: float = STRAGGLER_TIMEOUT,
    ) -> None:
        self.start_timeout, self._check_interval = start_timeout, check_interval
        self._eject_after, self._straggler_timeout = eject_after, straggler_timeout
        self.servers: list[S] = [self.make_server(address) for address in dict.fromkeys(addresses)]
        self._watch_tasks: dict[S, asyncio.Task[None]] = {}
        self._watch_failure: BaseException | None = None  # of the first task that failed
        self._watch_failed = asyncio.Event()
        self._session_servers: OrderedDict[str, S] = OrderedDict()
        self._checked, self._settled = asyncio.Event(), asyncio.Event()  # see `_update_settled`
        self._is_open = self._is_closed = False
        self.is_started = False

    # -- what a subclass says ------------------------------------------------------------------------------------------

    def make_server(self, address: str) -> S:
        """Return a server that is not connected yet."""
        raise NotImplementedError

    async def check_server(self, server: S, *, is_requested: bool) -> None:
        """Check a server, and admit it if it is down and can get requests. Raises the RamifyError why it cannot.

        `is_requested` says that it is down, or that a request has failed.
        """
        raise NotImplementedError

    def build_start_failure(self) -> RamifyError:
        """Return the failure of `start` if no server came up."""
        raise NotImplementedError

    def on_ejected(self, server: S, error: RamifyError) -> None:
        """Handle that a server that was up gets no more requests."""

    def on_unhealthy(self, server: S) -> None:
        """Handle that a server has failed `eject_after` checks in a row."""

    @property
    def refuses_requests(self) -> bool:
        """Whether requests should not wait for a server, because the pool is closed or for a reason of its own."""
        return self._is_closed

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the servers; wait until all are up, or until some are and the others take too long.

        Raises the failure of a server that can never be used, and `build_start_failure` if none is up in time.
        """
        self._is_open = True
        try:
            for server in self.servers:
                self._watch(server)
            await self._wait_until_started()
        except BaseException:
            await self.close()
            raise
        self.is_started = True
        return self

    async def _wait_until_started(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        with contextlib.suppress(TimeoutError):
            while not self.servers or any(self._is_pending(server) for server in self.servers):
                if self.up_servers:
                    deadline = min(deadline, time.monotonic() + self._straggler_timeout)
                self._checked.clear()
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._checked.wait()
                if self._watch_failure is not None:
                    raise self._watch_failure
                for server in self.servers:
                    if server.failure is not None and not server.failure.retryable:
                        raise server.failure
        if not self.up_servers:
            raise self.build_start_failure()

    def _is_pending(self, server: S) -> bool:
        return server.state is ServerState.DOWN and not server.is_broken

    async def close(self) -> None:
        """Stop the checks and close all connections. Requests that wait for a server fail."""
        self._is_open, self._is_closed, self.is_started = False, True, False
        self._update_settled()
        servers = {*self.servers, *self._watch_tasks}
        await cancel_all(self._watch_tasks.values())
        await asyncio.gather(*(server.close() for server in servers))

    async def wait_failed(self) -> None:
        """Wait until the task that watches a server fails, and raise its failure: the server is no longer checked."""
        await self._watch_failed.wait()
        assert self._watch_failure is not None
        raise self._watch_failure

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use the servers at these addresses from now on; if there is none, requests wait for one.

        A new server gets requests once it is admitted. A removed server gets no more, and is watched until those in
        flight have ended.
        """
        for server in [server for server in self.servers if server.address not in addresses]:
            self.servers.remove(server)
            server.state = ServerState.REMOVED
            server.check_now.set()
        known = {server.address for server in self.servers}
        for address in dict.fromkeys(addresses):
            if address not in known:
                self.servers.append(server := self.make_server(address))
                if self._is_open:
                    self._watch(server)
        self._update_settled()

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def up_servers(self) -> list[S]:
        """The servers that get requests."""
        return [server for server in self.servers if server.state is ServerState.UP]

    def describe_down(self) -> str:
        """Return the address and the reason of each server that is down."""
        down = [f"{server.address}: {server.reason}" for server in self.servers if server.state is ServerState.DOWN]
        return "; ".join(down) or "there is no address"

    def admit(self, server: S) -> None:
        """Start sending requests to a server, unless it was removed."""
        server.num_failed_checks = 0
        if server.state is ServerState.DOWN:
            server.state, server.failure, server.was_up = ServerState.UP, None, True
            self._update_settled()

    def eject(self, server: S, error: RamifyError) -> None:
        """Stop sending requests to a server until it is admitted again."""
        was_up, server.failure = server.state is ServerState.UP, error
        if was_up:
            server.state = ServerState.DOWN
            server.check_now.set()
        self._update_settled()
        if was_up:
            self.on_ejected(server, error)

    def _update_settled(self) -> None:
        """Wake requests that wait for a server when one is up, and also when they are refused."""
        self._checked.set()
        if self.up_servers or self.refuses_requests:
            self._settled.set()
        else:
            self._settled.clear()

    async def wait_until_up(self, timeout: float) -> bool:
        """Wait for a server, for at most `timeout` seconds, unless requests are refused; return whether one is up."""
        await wait_for_event(self._settled, timeout)
        return bool(self.up_servers)

    def pick(self, session: str | None = None, avoid: Collection[S] = ()) -> S | None:
        """Return the server for a request: not one of `avoid` if there is another; None if none is up.

        It is the one with the fewest requests in flight. A session stays with its server while that is up.
        """
        up = self.up_servers
        candidates = [server for server in up if server not in avoid] or up
        if not candidates:
            return None
        assigned = self._session_servers.get(session) if session is not None else None
        if assigned in candidates:
            assert session is not None
            self._session_servers.move_to_end(session)
            return assigned
        chosen = min(candidates, key=lambda server: (server.num_in_flight, server.num_served))
        if session is not None and assigned not in up:
            self._session_servers[session] = chosen
            if len(self._session_servers) > MAX_SESSIONS:
                self._session_servers.popitem(last=False)
        return chosen

    # -- checks --------------------------------------------------------------------------------------------------------

    def _watch(self, server: S) -> None:
        task = asyncio.create_task(self._watch_server(server), name=f"checks of {server.address}")
        self._watch_tasks[server] = task
        task.add_done_callback(lambda task: self._record_watch_end(server, task))

    def _record_watch_end(self, server: S, task: asyncio.Task[None]) -> None:
        del self._watch_tasks[server]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._watch_failure = self._watch_failure or error
            self._watch_failed.set()
        self._checked.set()

    async def _watch_server(self, server: S) -> None:
        """Admit a server when it is ready, and check it again and again, until it is removed and drained."""
        while not server.is_drained:
            is_requested = server.check_now.is_set() or server.state is ServerState.DOWN
            server.check_now.clear()
            try:
                await self.check_server(server, is_requested=is_requested)
                server.num_failed_checks = 0
            except RamifyError as error:
                self._record_failed_check(server, error)
            self._checked.set()
            await wait_for_event(server.check_now, self._get_interval(server))
        await server.close()

    def _get_interval(self, server: S) -> float:
        """Return the seconds until the next check: few for a server that is starting, more the longer it takes."""
        interval = JOIN_INTERVAL * (1 + server.num_failed_checks // 50)
        return min(self._check_interval, interval) if server.is_expected_soon else self._check_interval

    def _record_failed_check(self, server: S, error: RamifyError) -> None:
        server.num_failed_checks += 1
        if server.state is ServerState.DOWN:
            self.eject(server, error)
        elif server.num_failed_checks >= self._eject_after:
            if self._eject_after > 1:
                error = ProviderError(f"{server.num_failed_checks} checks failed, the last: {error.message}")
            self.eject(server, error)
            self.on_unhealthy(server)
