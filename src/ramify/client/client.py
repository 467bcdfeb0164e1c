"""The client: one object that samples from, and controls, all servers of a policy.

It owns its connections and one watching task per server; `start` and `close` (or `async with`) are their life. Every
call has a deadline, and a call that is cancelled hangs up, so that the server stops computing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import ClientSampling, Completion
from ramify.client.config import ClientConfig
from ramify.client.discovery import detect_engine, sync_weights
from ramify.client.engine_adapter import EngineAdapter, KVMode, PauseMode, UnknownWeights, WeightUpdate, WeightUpdateAck
from ramify.client.engine_load import EngineLoad, parse_load, parse_num_steps
from ramify.client.generate_api import GenerateRequest
from ramify.client.http_client import ConnectFailed, ResponseLost, ServerBusy, open_client, send_request
from ramify.client.replica_pool import Replica, ReplicaPool, ReplicaState
from ramify.client.stall_clock import StallClock
from ramify.errors import DeadlineExceeded, ProviderError, RamifyError, RequestInvalid, WeightsRefused
from ramify.model.version import PolicyVersion

T = TypeVar("T")
DEFAULT_TIMEOUT = 600.0  # seconds for one generation, unless the caller says otherwise


class InferenceClient:
    """A pooled client over one or several servers of the same model.

    `version` names the weights that engines without versions of their own (vLLM) start with.
    """

    def __init__(
        self, urls: str | Sequence[str], config: ClientConfig | None = None, *, version: PolicyVersion | None = None
    ) -> None:
        self.config = config or ClientConfig()
        addresses = [urls] if isinstance(urls, str) else list(urls)
        if not addresses:
            raise ProviderError("a client needs the address of at least one inference server")
        connect, connections = self.config.connect_timeout, self.config.connections
        self._pool = ReplicaPool(
            [
                Replica(
                    url.rstrip("/"), open_client(url.rstrip("/"), connect_timeout=connect, max_connections=connections)
                )
                for url in addresses
            ]
        )
        self._initial_version = version
        self._target_update: WeightUpdate | None = (
            None  # what every server has to serve; None leaves it what it started with
        )
        self._pause_mode: PauseMode | None = None
        self._control_lock = asyncio.Lock()  # one change at a time: pause, resume, update, a server that joins
        self._health_tasks: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Meet the servers. Returns when all are up, or some are and `patience` is over; raises if none is."""
        if self._health_tasks:
            raise ProviderError("the client is started already")
        meetings = [asyncio.create_task(self._join_when_ready(replica)) for replica in self._pool.replicas]
        try:
            patience = self.config.patience
            done, _ = await asyncio.wait(meetings, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
            for meeting in done:
                meeting.result()
            if not self._pool.up_replicas:
                raise ProviderError(f"no inference server came up within {patience:g} s: {self._pool.describe_down()}")
        except BaseException:
            await self.close()
            raise
        finally:
            await _cancel_all(meetings)
        self._health_tasks = [
            asyncio.create_task(self._monitor_health(replica), name=f"watch {replica.url}")
            for replica in self._pool.replicas
        ]
        return self

    async def close(self) -> None:
        """End the watching tasks and the connections."""
        await _cancel_all(self._health_tasks)
        self._health_tasks = []
        self._pool.is_closed = True
        for replica in self._pool.replicas:
            self._pool.eject(replica, "the client is closed")
            await replica.http.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
    ) -> Completion:
        """Take one sample after `prompt`.

        Calls with one `session` go to one server while it is up. A lower `priority` goes first. Prompts share cached
        prefixes only with prompts of the same `cache_salt`. A request whose answer was lost on the way is sent again
        only with `resample`: it may have been sampled, and another sample is another sample.

        A `clock` measures how long the engine made no progress. A request with a clock waits for a server until its
        deadline instead of `patience`. If it also has a seed, every server gives the same sample, so it is sent again
        when its answer was lost, and sent to another server when its own fails its health checks.
        """
        ask = GenerateRequest(prompt, sampling, priority, cache_salt)
        resend_if_lost = resend_if_lost or (clock is not None and sampling.seed is not None)
        with contextlib.nullcontext() if clock is None else clock.track_request(self.config.stall_tolerance):
            return await self._send_with_retries(
                session, timeout, lambda spoken: spoken.generate(ask), may_resend=resend_if_lost, clock=clock
            )

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        cache_salt: str | None = None,
    ) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1; NaN for the first."""
        return await self._send_with_retries(
            session, timeout, lambda spoken: spoken.score(token_ids, cache_salt), may_resend=True
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
        """Send to one server after another until one answers, as far as sending again is safe."""
        config, full, resent, last = self.config, set[Replica](), 0, "no server yet"
        patience = config.patience if clock is None else timeout
        async with self._timeout(timeout, lambda: f"an answer of {last}"):
            while True:
                replica = await self._pool.wait_for_replica(session, full, timeout=patience)
                last = replica.url
                try:
                    timed = (
                        contextlib.nullcontext() if clock is None else replica.timed_request(clock, movable=may_resend)
                    )
                    with replica.track_request():
                        async with timed:
                            return await call(replica.require_adapter)
                except ConnectFailed as error:
                    self._pool.eject(replica, str(error))
                    continue
                except UnknownWeights as error:
                    self._pool.eject(replica, str(error))  # when it is met again, its weights get a name
                    raise ProviderError(str(error)) from error
                except ResponseLost as error:
                    replica.check_now.set()
                    if not may_resend or resent >= config.retries:
                        raise ProviderError(f"the answer was lost: {error}") from error
                except ServerBusy as error:
                    if resent >= config.retries:
                        raise error.error from None
                    full.add(replica)
                    if full.issuperset(self._pool.up_replicas):
                        full.clear()
                        await asyncio.sleep(max(error.retry_after or 0.0, config.backoff * 2 ** min(resent, 4)))
                resent += 1
        raise AssertionError  # the block above returns or raises

    # -- control -------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """What each server that is up serves."""
        return {replica.url: replica.require_adapter.version for replica in self._pool.up_replicas}

    @property
    def down_replicas(self) -> dict[str, str]:
        """The servers that get no requests, and why."""
        return {replica.url: replica.reason for replica in self._pool.replicas if replica.state is ReplicaState.DOWN}

    async def get_loads(self) -> list[EngineLoad]:
        """How loaded every server is that is up and answers."""
        found: list[EngineLoad] = []
        for replica in self._pool.up_replicas:
            with contextlib.suppress(RamifyError, ConnectFailed, ResponseLost, ServerBusy):
                async with self._timeout(self.config.health_timeout, lambda url=replica.url: f"{url}/metrics"):
                    found.append(parse_load((await send_request(replica.http, "GET", "/metrics")).decode()))
        return found

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling on all servers; requests stay where they are (`keep`) or end with finish `abort`."""
        await self._call_all("pause", lambda spoken: spoken.pause(mode))
        self._pause_mode = mode

    async def resume(self) -> None:
        """Go on sampling on all servers."""
        self._pause_mode = None
        await self._call_all("resume", lambda spoken: spoken.resume())

    async def update_weights(
        self, directory: Path, version: PolicyVersion, kv_mode: KVMode = "recompute"
    ) -> list[WeightUpdateAck]:
        """Apply a published version on all servers, with requests in flight; who has applied it acknowledges.

        A server that does not is ejected until it does. If none does, its failure is raised and the old weights stay
        what every server is brought to.
        """
        update = WeightUpdate(directory, version, kv_mode)

        async def apply(spoken: EngineAdapter) -> float:
            return await spoken.update(update, paused=self._pause_mode is not None)

        seconds = await self._call_all(f"update to {version}", apply)
        self._target_update = update
        return [WeightUpdateAck(url, version, taken) for url, taken in seconds.items()]

    async def _call_all(self, operation: str, call: Callable[[EngineAdapter], Awaitable[T]]) -> dict[str, T]:
        """Call all servers that are up, or wait for one as requests do; the first failure is raised if none succeeds.

        A server that fails where others succeed is ejected, and so is one that fails without having refused: nobody
        knows what state it is in until it is met again.
        """
        await self._pool.wait_for_replica(None, (), timeout=self.config.patience)
        async with self._control_lock:
            replicas = self._pool.up_replicas
            if not replicas:
                raise ProviderError(f"{operation}: no inference server is up: {self._pool.describe_down()}")
            calls = (self._call_one(replica, operation, call) for replica in replicas)
            outcomes = dict(zip(replicas, await asyncio.gather(*calls)))
        done = {replica.url: done[0] for replica, done in outcomes.items() if not isinstance(done, RamifyError)}
        failed = {replica: error for replica, error in outcomes.items() if isinstance(error, RamifyError)}
        for replica, error in failed.items():
            if done or not isinstance(error, WeightsRefused):
                self._pool.eject(replica, f"{operation}: {error.name}: {error.message}")
        if not done:
            raise next(iter(failed.values()))
        return done

    async def _call_one(
        self, replica: Replica, operation: str, call: Callable[[EngineAdapter], Awaitable[T]]
    ) -> tuple[T] | RamifyError:
        """What one server answered, in a tuple, or how it failed."""
        try:
            async with self._timeout(self.config.control_deadline, lambda: f"{replica.url} to {operation}"):
                return (await call(replica.require_adapter),)
        except (ConnectFailed, ResponseLost, ServerBusy) as error:
            return ProviderError(str(error))
        except RamifyError as error:
            return error

    # -- the servers' health -------------------------------------------------------------------------------------------

    async def _join_when_ready(self, replica: Replica) -> None:
        """Try until the server is up. What trying again cannot cure is raised."""
        while replica.state is ReplicaState.DOWN:
            try:
                await self._join_replica(replica)
            except RamifyError as error:
                replica.reason = f"{error.name}: {error.message}"
                if not error.retryable:
                    raise
                await asyncio.sleep(min(self.config.health_interval, 0.2))

    async def _monitor_health(self, replica: Replica) -> None:
        """Look at one server's health, forever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.health_interval):
                    await replica.check_now.wait()
            replica.check_now.clear()
            try:
                await self._check_health(replica)
                if replica.state is ReplicaState.DOWN:
                    await self._join_replica(replica)
            except RamifyError as error:
                if replica.state is ReplicaState.DOWN:
                    replica.reason = f"{error.name}: {error.message}"

    async def _check_health(self, replica: Replica) -> None:
        """Ask for health; enough failures in a row eject."""
        try:
            async with self._timeout(self.config.health_timeout, lambda: f"{replica.url}/health"):
                await send_request(replica.http, "GET", "/health")
                if replica.has_timed_requests:
                    await self._record_progress(replica)
        except (RamifyError, ConnectFailed, ResponseLost, ServerBusy) as error:
            replica.num_failed_checks += 1
            if replica.num_failed_checks >= self.config.eject_after and replica.state is ReplicaState.UP:
                self._pool.eject(replica, f"{replica.num_failed_checks} health checks failed, the last: {error}")
                if self._pool.up_replicas:
                    replica.interrupt_movable_requests()
            raise ProviderError(str(error)) from error
        replica.num_failed_checks = 0

    async def _record_progress(self, replica: Replica) -> None:
        """Record progress if the engine's counter of steps has moved, or if it has no such counter that can be read."""
        steps: float | None = None
        with contextlib.suppress(ProviderError, RequestInvalid, ValueError):  # no metrics, or none that are numbers
            steps = parse_num_steps((await send_request(replica.http, "GET", "/metrics")).decode())
        if steps is None or steps != replica.last_num_steps:
            replica.record_progress()
        replica.last_num_steps = steps

    async def _join_replica(self, replica: Replica) -> None:
        """Meet a server, bring it to everybody's weights and state, and let it in."""
        deadline = self._timeout(self.config.control_deadline, lambda: f"{replica.url} to join; is it paused?")
        async with deadline, self._control_lock:
            try:
                spoken = await detect_engine(replica, self._initial_version)
                await sync_weights(replica, spoken, self._target_update)
                if self._pause_mode is not None:
                    await spoken.pause(self._pause_mode)
            except (ConnectFailed, ResponseLost, ServerBusy) as error:
                raise ProviderError(str(error)) from error
            replica.adapter = spoken
            self._pool.admit(replica)

    @contextlib.asynccontextmanager
    async def _timeout(self, seconds: float, describe_wait: Callable[[], str]) -> AsyncIterator[None]:
        """A deadline around a block; what was waited for is named when it passes."""
        try:
            async with asyncio.timeout(seconds) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"waited {seconds:g} s for {describe_wait()}") from error


async def _cancel_all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
