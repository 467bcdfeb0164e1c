"""The client that samples from, and controls, all inference servers of a policy.

It owns its connections and one health-check task per server, from `start` to `close` (or inside `async with`). Every
call has a timeout, and cancelling a call closes its connection, so that the server stops computing.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ramify.core.async_calls import fail_after
from ramify.core.errors import (
    ProviderError,
    RamifyError,
    RequestInvalid,
    WeightsMissing,
    WeightsRefused,
    WeightsReplaced,
)
from ramify.infer.client.completion import ClientSampling, Completion
from ramify.infer.client.config import ClientConfig
from ramify.infer.client.engine_adapter import (
    EngineAdapter,
    KVMode,
    UnknownWeights,
    WeightUpdate,
)
from ramify.infer.client.engine_detection import detect_engine, sync_weights
from ramify.infer.client.generate_messages import GenerateRequest, RequestImage
from ramify.infer.client.http_client import (
    ConnectFailed,
    HttpClient,
    RequestFailed,
    ResponseLost,
    ServerBusy,
    send_request,
)
from ramify.infer.client.replica import EngineLoad, Replica, TimedRequest, parse_load, parse_num_steps
from ramify.infer.client.stall_clock import StallClock
from ramify.processes.wire.server_pool import ServerPool, ServerState
from ramify.trace.columns import StructuredArray
from ramify.trace.version import PolicyVersion

T = TypeVar("T")
DEFAULT_TIMEOUT = 600.0  # seconds for one generation


class InferenceClient(ServerPool[Replica]):
    """A client of one or several servers of the same model.

    `version` names the weights with which engines that report no version (vLLM) were started.
    """

    def __init__(
        self, urls: str | Sequence[str], config: ClientConfig | None = None, *, version: PolicyVersion | None = None
    ) -> None:
        self.config = config or ClientConfig()
        urls = _normalize_urls([urls] if isinstance(urls, str) else urls)
        if not urls:
            raise ProviderError("a client needs the address of at least one inference server")
        super().__init__(
            urls,
            start_timeout=self.config.server_wait_timeout,
            check_interval=self.config.health_interval,
            eject_after=self.config.eject_after,
        )
        self._initial_version = version
        self._target_update: WeightUpdate | None = None  # what every server must serve; None keeps its initial weights
        self._control_lock = asyncio.Lock()  # serializes weight updates and joining servers
        self.loads: dict[str, EngineLoad] = {}

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the servers, as `ServerPool.start` does.

        Raises ProviderError if none is up within `server_wait_timeout` seconds, and EngineIncompatible if one is
        not an engine.
        """
        if self._is_open:
            raise ProviderError("the client is already started")
        if self._is_closed:
            raise ProviderError("the client is closed, and starts only once; create another one")
        return await super().start()

    async def close(self) -> None:
        """Stop the health checks and close the connections. Requests that wait for a server fail."""
        await super().close()
        for replica in self.servers:
            self.eject(replica, ProviderError("the client is closed"))

    def set_urls(self, urls: Sequence[str]) -> None:
        """Use the servers at these addresses from now on, as `set_addresses` does.

        A new server is admitted once it serves the same weights as the others. The requests in flight of a removed one
        are continued there while it is healthy; after that, those that may be sent again are.
        """
        self.set_addresses(_normalize_urls(urls))

    @property
    def urls(self) -> list[str]:
        """The addresses of the servers, whether they are up or not."""
        return [replica.url for replica in self.servers]

    @property
    def joined_urls(self) -> list[str]:
        """The addresses of the servers that were up at least once."""
        return [replica.url for replica in self.servers if replica.adapter is not None]

    def make_server(self, address: str) -> Replica:
        """Return a server that is not connected yet."""
        config = self.config
        http = HttpClient(address, connect_timeout=config.connect_timeout, max_connections=config.connections)
        return Replica(address, http)

    def build_start_failure(self) -> ProviderError:
        """Return the failure of a start without a server."""
        return ProviderError(f"no inference server came up within {self.start_timeout:g} s: {self.describe_down()}")

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        priority: int = 0,
        cache_salt: str | None = None,
        resend_if_lost: bool = False,
        clock: StallClock | None = None,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Sample one completion of `prompt`, which contains `images`.

        Calls with the same `session` go to one server while it is up. Requests with a lower `priority` go first.
        Prompts share cached prefixes only with prompts of the same `cache_salt`. If the response is lost, the request
        is sent again only with `resend_if_lost`: the server may have sampled, and sampling twice biases the result.

        A `clock` measures how long the engine made no progress. A request with a clock waits for a server until its
        timeout instead of `server_wait_timeout`. If it also has a seed, every server returns the same sample, so it is
        sent again if its response is lost, and moved to another server if its own fails the health checks.
        """
        request = GenerateRequest(prompt, sampling, priority, cache_salt, images)
        may_resend = resend_if_lost or (clock is not None and sampling.seed is not None)
        if clock is not None:
            clock.start_request(self.config.stall_tolerance)
        try:
            return await self._send_with_retries(
                session, timeout, lambda adapter: adapter.generate(request), may_resend=may_resend, clock=clock
            )
        finally:
            if clock is not None:
                clock.end_request()

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        cache_salt: str | None = None,
        start: int = 0,
    ) -> NDArray[np.float32]:
        """Return the logprob of every token from `start` on given those before it, at temperature 1.

        Tokens before `start` are NaN, and so is the first.
        """
        return await self._send_with_retries(
            session, timeout, lambda adapter: adapter.score(token_ids, cache_salt, start=start), may_resend=True
        )

    async def score_top(
        self,
        token_ids: Sequence[int],
        top_k: int,
        *,
        session: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        start: int = 0,
    ) -> tuple[NDArray[np.float32], StructuredArray]:
        """Return what `score` returns, and the `top_k` likeliest tokens of each position [tokens, top_k].

        They are records of `token` and `logprob`, the likeliest first.
        """
        return await self._send_with_retries(
            session, timeout, lambda adapter: adapter.score_top(token_ids, top_k, start=start), may_resend=True
        )

    async def _send_with_retries(
        self,
        session: str | None,
        timeout: float,
        call: Callable[[EngineAdapter], Awaitable[T]],
        *,
        may_resend: bool,
        clock: StallClock | None = None,
    ) -> T:
        """Send a request to one server after another until one responds, as far as sending it again is allowed."""
        config, num_resent, last_url = self.config, 0, "no server yet"
        busy: set[Replica] = set()
        replica_timeout = config.server_wait_timeout if clock is None else timeout
        async with fail_after(timeout, lambda: f"a response of {last_url}"):
            while True:
                replica = await self._wait_for_replica(session, busy, replica_timeout)
                last_url = replica.url
                timed = contextlib.nullcontext() if clock is None else TimedRequest(replica, clock, movable=may_resend)
                try:
                    with replica.track_request():
                        async with timed:
                            return await call(replica.require_adapter())
                except ConnectFailed as error:
                    self.eject(replica, ProviderError(str(error)))
                    continue
                except UnknownWeights as error:
                    failure = ProviderError(str(error))
                    self.eject(replica, failure)  # its weights are labelled when it joins again
                    raise failure from error
                except ResponseLost as error:
                    replica.check_now.set()
                    if not may_resend or num_resent >= config.retries:
                        raise ProviderError(f"the response was lost: {error}") from error
                except (ServerBusy, ProviderError) as error:
                    if num_resent >= config.retries:
                        raise (error.error if isinstance(error, ServerBusy) else error) from None
                    busy.add(replica)
                    if busy.issuperset(self.up_servers):
                        busy.clear()
                        retry_after = error.retry_after if isinstance(error, ServerBusy) else None
                        await asyncio.sleep(max(retry_after or 0.0, config.backoff * 2 ** min(num_resent, 4)))
                num_resent += 1

    async def _wait_for_replica(self, session: str | None, avoid: Collection[Replica], timeout: float) -> Replica:
        """Return the server that `pick` chooses; if none is up, wait up to `timeout` seconds for one.

        Raises ProviderError with the reason of each server if none came up.
        """
        while (replica := self.pick(session, avoid)) is None:
            if self._is_closed:
                raise ProviderError("the client is closed")
            if not await self.wait_until_up(timeout) and not self._is_closed:
                raise ProviderError(f"no inference server is up after {timeout:g} s: {self.describe_down()}")
        return replica

    # -- control -------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """The version of the weights of each server that is up, by URL."""
        return {replica.url: replica.require_adapter().version for replica in self.up_servers}

    @property
    def versions_of_copying_engines(self) -> dict[str, PolicyVersion]:
        """The version of each server that is up and copies weights from the trainer's memory, by URL."""
        adapters = [replica.require_adapter() for replica in self.up_servers]
        return {adapter.url: adapter.version for adapter in adapters if adapter.copies_from_trainer}

    @property
    def down_replicas(self) -> dict[str, str]:
        """The reasons why servers are down, by URL."""
        return {replica.url: replica.reason for replica in self.servers if replica.state is ServerState.DOWN}

    async def get_loads(self) -> dict[str, EngineLoad]:
        """Measure the load of every server that is up and responds, by URL; `loads` are the last results."""
        loads: dict[str, EngineLoad] = {}
        for replica in self.up_servers:
            with contextlib.suppress(RamifyError, RequestFailed):
                async with fail_after(self.config.health_timeout, f"{replica.url}/metrics"):
                    metrics = (await send_request(replica.http, "GET", "/metrics")).decode()
                    loads[replica.url] = parse_load(metrics)
        self.loads = loads
        return loads

    async def update_weights(
        self, directory: Path, version: PolicyVersion, kv_mode: KVMode = "recompute", *, run: str = ""
    ) -> dict[str, float]:
        """Load published weights on all servers; requests in flight continue with them.

        Return how many seconds each server that applied them has paused its requests, by URL. A server that fails is
        ejected until it has the new weights. If all fail, the first failure is raised and the target stays the old
        version. If no server is up, the first to come up joins with the new weights: the old ones may no longer exist.
        """
        update, old_target = WeightUpdate(directory, version, kv_mode, run), self._target_update
        if not self.up_servers:
            self._target_update = update
        try:
            seconds_by_url = await self._update_all(update)
        except BaseException:
            self._target_update = old_target  # servers that refuse the new weights can still join with the old ones
            raise
        self._target_update = update
        return seconds_by_url

    async def _update_all(self, update: WeightUpdate) -> dict[str, float]:
        """Update all servers that are up and return the seconds by URL; if none is up, wait for one as requests do.

        A server that fails is ejected, because its state is unknown until it joins again. It is kept only if all
        servers fail and it rejected the weights. If no server succeeds, the first failure is raised.
        """
        await self._wait_for_replica(None, (), self.config.server_wait_timeout)
        async with self._control_lock:
            replicas = self.up_servers
            if not replicas:
                raise ProviderError(f"update to {update.version}: no inference server is up: {self.describe_down()}")
            results = await asyncio.gather(*(self._update(replica, update) for replica in replicas))
            outcomes = dict(zip(replicas, results))
        seconds = {replica.url: result for replica, result in outcomes.items() if not isinstance(result, RamifyError)}
        errors = {replica: error for replica, error in outcomes.items() if isinstance(error, RamifyError)}
        for replica, error in errors.items():
            if seconds or not isinstance(error, WeightsRefused | WeightsReplaced):
                self.eject(replica, ProviderError(f"update to {update.version}: {error.name}: {error.message}"))
        if not seconds:
            raise next(iter(errors.values()))
        return seconds

    async def _update(self, replica: Replica, update: WeightUpdate) -> float | RamifyError:
        """Return the seconds that the update of one server took, or its failure."""
        try:
            async with fail_after(self.config.control_timeout, f"{replica.url} to update to {update.version}"):
                return await replica.require_adapter().update(update)
        except RequestFailed as error:
            return ProviderError(str(error))
        except RamifyError as error:
            return error

    # -- health --------------------------------------------------------------------------------------------------------

    async def check_server(self, server: Replica, *, is_requested: bool) -> None:
        """Check the health of a server, and join it if it is down.

        While the client starts, servers are joined without a health check: a server of another kind has none.
        """
        if self.is_started:
            try:
                async with fail_after(self.config.health_timeout, f"{server.url}/health"):
                    await send_request(server.http, "GET", "/health")
                    if server.timed_requests:
                        await self._record_progress(server)
            except RequestFailed as error:
                if not isinstance(error, ServerBusy) or not isinstance(error.error, WeightsMissing):
                    raise ProviderError(str(error)) from error
                self.eject(server, error.error)  # it joins with the weights that it lacks
        if server.state is ServerState.DOWN:
            await self._join_replica(server)

    def on_unhealthy(self, server: Replica) -> None:
        """Move the requests of a server that may be sent to another one, if there is one or it was removed."""
        if self.up_servers or server.state is ServerState.REMOVED:
            server.interrupt_movable_requests()

    async def _record_progress(self, replica: Replica) -> None:
        """Record progress if the engine's step counter has changed, or cannot be read."""
        num_steps: float | None = None
        with contextlib.suppress(ProviderError, RequestInvalid, ValueError):  # no metrics, or not numeric
            num_steps = parse_num_steps((await send_request(replica.http, "GET", "/metrics")).decode())
        if num_steps is None or num_steps != replica.last_num_steps:
            replica.record_progress()
        replica.last_num_steps = num_steps

    async def _join_replica(self, replica: Replica) -> None:
        """Detect a server's engine, bring it to the target weights, and admit it."""
        timeout = fail_after(self.config.control_timeout, f"{replica.url} to join; is it paused?")
        async with timeout, self._control_lock:
            try:
                adapter = await detect_engine(replica, self._initial_version)
                await sync_weights(replica, adapter, self._target_update)
            except RequestFailed as error:
                raise ProviderError(str(error)) from error
            replica.adapter = adapter
            self.admit(replica)


def _normalize_urls(urls: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(url.rstrip("/") for url in urls))
