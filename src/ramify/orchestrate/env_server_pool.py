"""The env servers of one source: a request goes to the least loaded one, and to another one if its server is lost.

    DOWN -> UP       it answers, has a worker, the environment of the others and the current addresses of engines
    UP -> DOWN       a request was lost with it, or it has no worker, or another environment
    any -> REMOVED   its address was removed from the list; requests in flight stay with it

A lost server may be alive and finish its attempts beside the servers that run them again. These results count for
nobody: the connection drops replies to requests that were given up, and the ledger takes one result per attempt.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from ramify.core.async_calls import WatchTasks
from ramify.core.errors import EnvironmentChanged, Failure, PeerLost, ProcessDied, RamifyError
from ramify.orchestrate.connected_env_server import ConnectedEnvServer
from ramify.processes.wire import WireSettings
from ramify.processes.wire.lifecycle import AsyncService
from ramify.processes.wire.message import JOIN_INTERVAL, STRAGGLER_TIMEOUT, ServerState
from ramify.rollout.envserver.client import CONTROL_TIMEOUT, EnvClient, RolloutResult
from ramify.rollout.envserver.messages import AddressUpdate, EnvServerInfo, GroupScores, TaskPage
from ramify.run.state import EnvServerStatus
from ramify.trace import Trace

CHECK_INTERVAL = 1.0  # seconds between two checks of any other server
MAX_FAILOVERS = 10  # servers that may be lost while they run one attempt

T = TypeVar("T")


class EnvServerPool(AsyncService):
    """The env servers of the source `name`, from `start` to `close`.

    `get_update` returns the addresses of inference servers that all env servers should know; None if those of their
    configuration are right. `on_lost` gets a failure for each server that is lost or has another environment than the
    others. `start_timeout` is the seconds that `start` waits for a server, and a request if there is none; once one is
    up, `start` waits `straggler_timeout` seconds for the others.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        secret: str | None = None,
        *,
        start_timeout: float,
        get_update: Callable[[], AddressUpdate | None] = lambda: None,
        on_lost: Callable[[Failure], None] = lambda _: None,
        settings: WireSettings | None = None,
        straggler_timeout: float = STRAGGLER_TIMEOUT,
    ) -> None:
        self.name, self._secret, self._settings, self.start_timeout = name, secret, settings, start_timeout
        self._get_update, self._on_lost, self._straggler_timeout = get_update, on_lost, straggler_timeout
        self.servers = [ConnectedEnvServer(address) for address in dict.fromkeys(addresses)]
        self._servers_by_rollout: dict[str, ConnectedEnvServer] = {}
        self._watch_tasks: WatchTasks[ConnectedEnvServer] = WatchTasks()
        self._settled, self._checked = asyncio.Event(), asyncio.Event()  # see `_update_settled`
        self._is_open = False
        self._info: tuple[str, EnvServerInfo] | None = None  # with the address of the first server that came up

    # -- servers -------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the servers; wait until all are up, or until some are and the others take too long.

        Raises the failure of a server that can never be used, or that of the first server if none is up in time.
        """
        self._is_open = True
        try:
            for server in self.servers:
                self._watch(server)
            await self._wait_until_started()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close all connections."""
        self._is_open = False
        servers = {*self.servers, *self._watch_tasks}
        await self._watch_tasks.cancel()
        await asyncio.gather(*(server.client.close() for server in servers if server.client is not None))

    async def wait_failed(self) -> None:
        """Wait until the task that watches a server fails, and raise its failure: the server is no longer checked."""
        await self._watch_tasks.wait_failed()

    @property
    def up_servers(self) -> list[ConnectedEnvServer]:
        """The servers that get requests."""
        return [server for server in self.servers if server.state is ServerState.UP]

    @property
    def info(self) -> EnvServerInfo:
        """The description of the environment, which all servers that get requests have."""
        assert self._info is not None, "no server was up yet"
        return self._info[1]

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use the servers at these addresses from now on; if there is none, requests wait for one.

        A removed server gets no more requests. Its attempts in flight continue there; if it is lost, they are run
        again on another server.
        """
        for server in [server for server in self.servers if server.address not in addresses]:
            self.servers.remove(server)
            server.state = ServerState.REMOVED
            server.check_now.set()
        known = {server.address for server in self.servers}
        for address in dict.fromkeys(addresses):
            if address not in known:
                self.servers.append(server := ConnectedEnvServer(address))
                if self._is_open:
                    self._watch(server)
        self._update_settled()

    def find_address(self, rollout_id: str) -> str | None:
        """Return the address of the server that runs an attempt; None if the attempt waits for a server."""
        server = self._servers_by_rollout.get(rollout_id)
        return None if server is None else server.address

    def describe(self) -> list[EnvServerStatus]:
        """Return address, state and counters of each server."""
        return [server.describe() for server in self.servers]

    async def wait_until_up(self, timeout: float) -> bool:
        """Wait for a server, for at most `timeout` seconds; return whether one is up.

        Return at once if all servers have another environment: requests are refused then.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        return bool(self.up_servers)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def run(self, task: Mapping[str, Any], *, id: str, timeout: float, **options: Any) -> RolloutResult:
        """Run one rollout on the least loaded server, with the `options` of `EnvClient.run`.

        If its server is lost while another is up, it is run again there, under the same id.
        """
        try:
            return await self._call(
                lambda client, timeout: client.run(dict(task), id=id, timeout=timeout, **options), timeout, id
            )
        finally:
            self._servers_by_rollout.pop(id, None)

    async def score_group(
        self, task: Mapping[str, Any], traces: Sequence[Trace], *, environment_digest: str, timeout: float
    ) -> GroupScores:
        """Compute the group rewards of all attempts at a task."""
        return await self._call(
            lambda client, timeout: client.score_group(
                dict(task), traces, environment_digest=environment_digest, timeout=timeout
            ),
            timeout,
        )

    async def tasks(self, start: int, count: int, *, timeout: float) -> TaskPage:
        """Return the tasks `start` to `start + count` of the taskset."""
        return await self._call(lambda client, timeout: client.tasks(start, count, timeout=timeout), timeout)

    async def _call(self, call: Callable[[EnvClient, float], Awaitable[T]], timeout: float, rollout_id: str = "") -> T:
        deadline = time.monotonic() + timeout
        for num_failovers_left in reversed(range(MAX_FAILOVERS + 1)):
            server = await self._pick_server(deadline)
            assert server.client is not None  # every server that was up has one
            if rollout_id:
                self._servers_by_rollout[rollout_id] = server
            try:
                with server.track_request():
                    result = await call(server.client, deadline - time.monotonic())
                server.num_done += bool(rollout_id)
                return result
            except (PeerLost, EnvironmentChanged) as error:
                server.num_lost += bool(rollout_id)
                self._mark_down(server, error)
                is_alone = isinstance(error, PeerLost) and not self.up_servers  # otherwise another may be restarting
                if not num_failovers_left or is_alone:
                    raise
            except ProcessDied:
                server.check_now.set()  # it may have no worker at all
                raise
        raise AssertionError  # the last iteration returns or raises

    async def _pick_server(self, deadline: float) -> ConnectedEnvServer:
        """Return the server with the fewest requests in flight; wait for one if none is up.

        Raises PeerLost, or EnvironmentChanged if all servers have another environment.
        """
        if not await self.wait_until_up(min(self.start_timeout, deadline - time.monotonic())):
            if self._are_all_changed:
                problem = f"all env servers of source {self.name} differ from the environment that the run started with"
                raise EnvironmentChanged(f"{problem}: {self._describe_down()}")
            raise PeerLost(f"no env server of source {self.name} is up: {self._describe_down()}")
        return min(self.up_servers, key=lambda server: (server.num_in_flight, server.num_done))

    # -- checks --------------------------------------------------------------------------------------------------------

    async def _wait_until_started(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while not self.servers or any(server.is_pending for server in self.servers):
            if self.up_servers:
                deadline = min(deadline, time.monotonic() + self._straggler_timeout)
            self._checked.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._checked.wait()
            except TimeoutError:
                break
            for server in self.servers:
                if server.failure is not None and not server.failure.retryable:
                    raise server.failure
        if not self.up_servers:
            failure = self.servers[0].failure if self.servers else None
            if failure is not None and not isinstance(failure, PeerLost):
                raise failure
            what = f"the env server of source {self.name} was not reachable within {self.start_timeout:g} s"
            raise PeerLost(f"{what}: {self._describe_down()}")

    def _watch(self, server: ConnectedEnvServer) -> None:
        self._watch_tasks.start(server, self._watch_server(server), f"env server {server.address}")

    async def _watch_server(self, server: ConnectedEnvServer) -> None:
        """Join a server when it is ready, and check it when a request fails, until it is removed."""
        while not server.is_drained:
            is_check_due = server.check_now.is_set() or server.state is ServerState.DOWN
            server.check_now.clear()
            try:
                await self._check_server(server, is_check_due)
            except RamifyError as error:
                self._mark_down(server, error)
            self._checked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_INTERVAL if server.is_expected_soon else CHECK_INTERVAL):
                    await server.check_now.wait()
        if server.client is not None:
            await server.client.close()

    async def _check_server(self, server: ConnectedEnvServer, is_check_due: bool) -> None:
        """Tell a server the current addresses, and check its health if that is due.

        Raises PeerLost, ProcessDied if the server has no worker, or EnvironmentChanged.
        """
        client = await server.connect(self._secret, self._settings)
        await server.send_update(client, self._get_update())
        if not is_check_due:
            return
        health = await client.health()
        server.is_broken = health.state == "broken"
        if health.state != "ok":
            reason = health.reason or health.state
            raise ProcessDied(f"the env server of source {self.name} has no worker: {reason}")
        if server.state is ServerState.DOWN:
            self._check_environment(server.address, await client.info(count_tasks=False, timeout=CONTROL_TIMEOUT))
        if server.state is ServerState.DOWN:  # it may have been removed meanwhile
            server.state, server.failure, server.was_up = ServerState.UP, None, True
            self._update_settled()

    def _check_environment(self, address: str, info: EnvServerInfo) -> None:
        """Raise EnvironmentChanged unless a server has the environment of the first one that came up."""
        if self._info is None:
            self._info = (address, info)
        first_address, expected, actual = self._info[0], self.info.environment_digest, info.environment_digest
        if actual != expected:
            raise EnvironmentChanged(
                f"the env servers of source {self.name} have different environments: {expected} at {first_address}, "
                f"{actual} at {address}; start them with the same code and settings"
            )

    def _mark_down(self, server: ConnectedEnvServer, error: RamifyError) -> None:
        is_new = server.failure is None or server.failure.message != error.message
        server.failure = error
        if server.state is not ServerState.UP:
            self._update_settled()
            if is_new and isinstance(error, EnvironmentChanged):
                self._on_lost(Failure.from_exception(error))
            return
        server.state = ServerState.DOWN
        server.check_now.set()
        self._update_settled()
        if len(self.servers) > 1:  # the loss of the only server is reported by each of its attempts
            self._on_lost(Failure.from_exception(error))

    @property
    def _are_all_changed(self) -> bool:
        failures = [server.failure for server in self.servers]
        return bool(failures) and all(isinstance(failure, EnvironmentChanged) for failure in failures)

    def _update_settled(self) -> None:
        """Wake requests that wait for a server when one is up, and also when all have another environment."""
        if self.up_servers or self._are_all_changed:
            self._settled.set()
        else:
            self._settled.clear()

    def _describe_down(self) -> str:
        down = [f"{server.address}: {server.reason}" for server in self.servers if server.state is ServerState.DOWN]
        return "; ".join(down) or "it has no address"
