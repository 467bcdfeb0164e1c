"""The env servers of one source: a request goes to the least loaded one, and to another one if its server is lost.

A server gets requests while it answers and has a worker, the environment of the others, and the current addresses of
engines.

A lost server may be alive and finish its attempts beside the servers that run them again. These results count for
nobody: the connection drops replies to requests that have timed out, and the ledger takes one result per attempt.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ramify.core.errors import EnvironmentChanged, Failure, PeerLost, ProcessDied, RamifyError
from ramify.processes.wire import WireSettings
from ramify.processes.wire.server_pool import STRAGGLER_TIMEOUT, PooledServer, ServerPool, ServerState
from ramify.rollout.envserver.client import CONTROL_TIMEOUT, EnvClient, RolloutResult
from ramify.rollout.envserver.messages import AddressUpdate, EnvServerInfo, GroupScores, TaskPage
from ramify.run.state import EnvServerStatus
from ramify.trace import Trace

CONNECT_TIMEOUT = 10.0  # seconds for one try to connect
CHECK_INTERVAL = 1.0  # seconds between two checks of a server
MAX_FAILOVERS = 10  # servers that may be lost while they run one attempt

T = TypeVar("T")


class ConnectedEnvServer(PooledServer):
    """A server of one source.

    `client` is set once it is connected; `is_broken` says that its workers fail to boot; `num_done` counts the attempts
    that it answered, `num_lost` those that were lost with it.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.client: EnvClient | None = None
        self.num_done = self.num_lost = 0
        self._sent_update: tuple[AddressUpdate, int] | None = None  # and the session in which it was sent

    async def connect(self, secret: str | None, settings: WireSettings | None) -> EnvClient:
        """Return the open connection, or open it. Raises PeerLost or PeerRefused."""
        if self.client is None:
            self.client = await EnvClient(self.address, secret, settings=settings).start(CONNECT_TIMEOUT)
        return self.client

    async def close(self) -> None:
        """Close the connection."""
        if self.client is not None:
            await self.client.close()

    async def send_update(self, client: EnvClient, update: AddressUpdate | None) -> None:
        """Tell the server where the inference servers are, unless it was told so in this session."""
        if update is not None and self._sent_update != (update, client.session_number):
            session_number = client.session_number
            await client.update_addresses(update)
            self._sent_update = (update, session_number)

    def describe(self) -> EnvServerStatus:
        """Return address, state and counters."""
        return EnvServerStatus(self.address, self.state.value, self.num_in_flight, self.num_done, self.num_lost)


class EnvServerPool(ServerPool[ConnectedEnvServer]):
    """The env servers of the source `name`.

    `get_update` returns the addresses of inference servers that all env servers should know; None if their configured
    ones are right. `on_lost` gets a failure for each server that is lost or has another environment than the others.
    `start_timeout` is the seconds that `start` waits for a server, and a request if there is none; once one is up,
    `start` waits `straggler_timeout` seconds for the others.
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
        super().__init__(
            addresses,
            start_timeout=start_timeout,
            check_interval=CHECK_INTERVAL,
            straggler_timeout=straggler_timeout,
        )
        self.name, self._secret, self._settings = name, secret, settings
        self._get_update, self._on_lost = get_update, on_lost
        self._servers_by_rollout: dict[str, ConnectedEnvServer] = {}
        self._info: tuple[str, EnvServerInfo] | None = None  # with the address of the first server that came up

    @property
    def info(self) -> EnvServerInfo:
        """The description of the environment, which all servers that get requests have."""
        assert self._info is not None, "no server was up yet"
        return self._info[1]

    def find_address(self, rollout_id: str) -> str | None:
        """Return the address of the server that runs an attempt; None if the attempt waits for a server."""
        server = self._servers_by_rollout.get(rollout_id)
        return None if server is None else server.address

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
                self.eject(server, error)
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
            if self._has_changed:
                problem = f"all env servers of source {self.name} differ from the environment that the run started with"
                raise EnvironmentChanged(f"{problem}: {self.describe_down()}")
            raise PeerLost(f"no env server of source {self.name} is up: {self.describe_down()}")
        server = self.pick()
        assert server is not None
        return server

    # -- checks --------------------------------------------------------------------------------------------------------

    def make_server(self, address: str) -> ConnectedEnvServer:
        """Return a server that is not connected yet."""
        return ConnectedEnvServer(address)

    async def check_server(self, server: ConnectedEnvServer, *, is_requested: bool) -> None:
        """Tell a server the current addresses, and check its health if that is due.

        Raises PeerLost, ProcessDied if the server has no worker, or EnvironmentChanged.
        """
        client = await server.connect(self._secret, self._settings)
        await server.send_update(client, self._get_update())
        if not is_requested:
            return
        health = await client.health()
        server.is_broken = health.state == "broken"
        if health.state != "ok":
            reason = health.reason or health.state
            raise ProcessDied(f"the env server of source {self.name} has no worker: {reason}")
        if server.state is ServerState.DOWN:
            self._check_environment(server, await client.info(count_tasks=False, timeout=CONTROL_TIMEOUT))
            self.admit(server)

    def _check_environment(self, server: ConnectedEnvServer, info: EnvServerInfo) -> None:
        """Raise EnvironmentChanged unless a server has the environment of the first one that came up."""
        if self._info is None:
            self._info = (server.address, info)
        first_address, expected, actual = self._info[0], self.info.environment_digest, info.environment_digest
        if actual == expected:
            return
        error = EnvironmentChanged(
            f"the env servers of source {self.name} have different environments: {expected} at {first_address}, "
            f"{actual} at {server.address}; start them with the same code and settings"
        )
        if server.failure is None or server.failure.message != error.message:
            self._on_lost(Failure.from_exception(error))
        raise error

    def build_start_failure(self) -> RamifyError:
        """Return the failure of the first server, or PeerLost."""
        failure = self.servers[0].failure if self.servers else None
        if failure is not None and not isinstance(failure, PeerLost):
            return failure
        what = f"the env server of source {self.name} was not reachable within {self.start_timeout:g} s"
        return PeerLost(f"{what}: {self.describe_down()}")

    def on_ejected(self, server: ConnectedEnvServer, error: RamifyError) -> None:
        """Report the loss of a server; the loss of the only one is reported by each of its attempts."""
        if len(self.servers) > 1:
            self._on_lost(Failure.from_exception(error))

    @property
    def refuses_requests(self) -> bool:
        """Whether the pool is closed, or all servers have another environment."""
        return super().refuses_requests or self._has_changed

    @property
    def _has_changed(self) -> bool:
        """Whether all servers have another environment."""
        failures = [server.failure for server in self.servers]
        return bool(failures) and all(isinstance(failure, EnvironmentChanged) for failure in failures)
