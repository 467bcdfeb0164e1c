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

from ramify.client.answers import Ask
from ramify.client.completion import Completion, Sampling
from ramify.client.config import ClientConfig
from ramify.client.control import KV, Acknowledgement, Dialect, PauseMode, Unnamed, Update
from ramify.client.http import Busy, Lost, Unsent, exchange, open_client
from ramify.client.load import Load, read_load, read_steps
from ramify.client.meet import catch_up, meet
from ramify.client.pool import Pool, Replica, State
from ramify.client.stall import StallClock
from ramify.errors import DeadlineExceeded, ProviderError, RamifyError, RequestInvalid, WeightsRefused
from ramify.model.version import Version

T = TypeVar("T")
DEADLINE = 600.0  # seconds for one generation, unless the caller says otherwise


class Client:
    """A pooled client over one or several servers of the same model.

    `version` names the weights that engines without versions of their own (vLLM) start with.
    """

    def __init__(
        self, urls: str | Sequence[str], config: ClientConfig | None = None, *, version: Version | None = None
    ) -> None:
        self.config = config or ClientConfig()
        addresses = [urls] if isinstance(urls, str) else list(urls)
        if not addresses:
            raise ProviderError("a client needs the address of at least one inference server")
        connect, connections = self.config.connect_timeout, self.config.connections
        self._pool = Pool(
            [
                Replica(url.rstrip("/"), open_client(url.rstrip("/"), connect=connect, connections=connections))
                for url in addresses
            ]
        )
        self._version = version
        self._update: Update | None = None  # what every server has to serve; None leaves it what it started with
        self._paused: PauseMode | None = None
        self._control = asyncio.Lock()  # one change at a time: pause, resume, update, a server that joins
        self._watchers: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Meet the servers. Returns when all are up, or some are and `patience` is over; raises if none is."""
        if self._watchers:
            raise ProviderError("the client is started already")
        meetings = [asyncio.create_task(self._first_meeting(replica)) for replica in self._pool.replicas]
        try:
            patience = self.config.patience
            done, _ = await asyncio.wait(meetings, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
            for meeting in done:
                meeting.result()
            if not self._pool.up:
                raise ProviderError(f"no inference server came up within {patience:g} s: {self._pool.reasons()}")
        except BaseException:
            await self.close()
            raise
        finally:
            await _end(meetings)
        self._watchers = [
            asyncio.create_task(self._watch(replica), name=f"watch {replica.url}") for replica in self._pool.replicas
        ]
        return self

    async def close(self) -> None:
        """End the watching tasks and the connections."""
        await _end(self._watchers)
        self._watchers = []
        self._pool.closed = True
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
        sampling: Sampling,
        *,
        session: str | None = None,
        deadline: float = DEADLINE,
        priority: int = 0,
        cache_salt: str | None = None,
        resample: bool = False,
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
        ask = Ask(prompt, sampling, priority, cache_salt)
        resample = resample or (clock is not None and sampling.seed is not None)
        with contextlib.nullcontext() if clock is None else clock.waiting(self.config.stall_tolerance):
            return await self._sent(session, deadline, lambda spoken: spoken.generate(ask), again=resample, clock=clock)

    async def score(
        self,
        ids: Sequence[int],
        *,
        session: str | None = None,
        deadline: float = DEADLINE,
        cache_salt: str | None = None,
    ) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1; NaN for the first."""
        return await self._sent(session, deadline, lambda spoken: spoken.score(ids, cache_salt), again=True)

    async def _sent(
        self,
        session: str | None,
        deadline: float,
        call: Callable[[Dialect], Awaitable[T]],
        *,
        again: bool,
        clock: StallClock | None = None,
    ) -> T:
        """Send to one server after another until one answers, as far as sending again is safe."""
        config, full, resent, last = self.config, set[Replica](), 0, "no server yet"
        patience = config.patience if clock is None else deadline
        async with self._within(deadline, lambda: f"an answer of {last}"):
            while True:
                replica = await self._pool.choose(session, full, patience=patience)
                last = replica.url
                try:
                    timed = contextlib.nullcontext() if clock is None else replica.timed_request(clock, movable=again)
                    with replica.loaded():
                        async with timed:
                            return await call(replica.spoken)
                except Unsent as error:
                    self._pool.eject(replica, str(error))
                    continue
                except Unnamed as error:
                    self._pool.eject(replica, str(error))  # when it is met again, its weights get a name
                    raise ProviderError(str(error)) from error
                except Lost as error:
                    replica.look.set()
                    if not again or resent >= config.retries:
                        raise ProviderError(f"the answer was lost: {error}") from error
                except Busy as error:
                    if resent >= config.retries:
                        raise error.error from None
                    full.add(replica)
                    if full.issuperset(self._pool.up):
                        full.clear()
                        await asyncio.sleep(max(error.wait or 0.0, config.backoff * 2 ** min(resent, 4)))
                resent += 1
        raise AssertionError  # the block above returns or raises

    # -- control -------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, Version]:
        """What each server that is up serves."""
        return {replica.url: replica.spoken.version for replica in self._pool.up}

    @property
    def down(self) -> dict[str, str]:
        """The servers that get no requests, and why."""
        return {replica.url: replica.reason for replica in self._pool.replicas if replica.state is State.DOWN}

    async def loads(self) -> list[Load]:
        """How loaded every server is that is up and answers."""
        found: list[Load] = []
        for replica in self._pool.up:
            with contextlib.suppress(RamifyError, Unsent, Lost, Busy):
                async with self._within(self.config.health_timeout, lambda url=replica.url: f"{url}/metrics"):
                    found.append(read_load((await exchange(replica.http, "GET", "/metrics")).decode()))
        return found

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling on all servers; requests stay where they are (`keep`) or end with finish `abort`."""
        await self._everywhere("pause", lambda spoken: spoken.pause(mode))
        self._paused = mode

    async def resume(self) -> None:
        """Go on sampling on all servers."""
        self._paused = None
        await self._everywhere("resume", lambda spoken: spoken.resume())

    async def update_weights(self, directory: Path, version: Version, kv: KV = "recompute") -> list[Acknowledgement]:
        """Apply a published version on all servers, with requests in flight; who has applied it acknowledges.

        A server that does not is ejected until it does. If none does, its failure is raised and the old weights stay
        what every server is brought to.
        """
        update = Update(directory, version, kv)

        async def apply(spoken: Dialect) -> float:
            return await spoken.update(update, paused=self._paused is not None)

        seconds = await self._everywhere(f"update to {version}", apply)
        self._update = update
        return [Acknowledgement(url, version, taken) for url, taken in seconds.items()]

    async def _everywhere(self, what: str, call: Callable[[Dialect], Awaitable[T]]) -> dict[str, T]:
        """Call all servers that are up, or wait for one as requests do; the first failure is raised if none succeeds.

        A server that fails where others succeed is ejected, and so is one that fails without having refused: nobody
        knows what state it is in until it is met again.
        """
        await self._pool.choose(None, (), patience=self.config.patience)
        async with self._control:
            replicas = self._pool.up
            if not replicas:
                raise ProviderError(f"{what}: no inference server is up: {self._pool.reasons()}")
            calls = (self._told(replica, what, call) for replica in replicas)
            outcomes = dict(zip(replicas, await asyncio.gather(*calls)))
        done = {replica.url: done[0] for replica, done in outcomes.items() if not isinstance(done, RamifyError)}
        failed = {replica: error for replica, error in outcomes.items() if isinstance(error, RamifyError)}
        for replica, error in failed.items():
            if done or not isinstance(error, WeightsRefused):
                self._pool.eject(replica, f"{what}: {error.name}: {error.message}")
        if not done:
            raise next(iter(failed.values()))
        return done

    async def _told(
        self, replica: Replica, what: str, call: Callable[[Dialect], Awaitable[T]]
    ) -> tuple[T] | RamifyError:
        """What one server answered, in a tuple, or how it failed."""
        try:
            async with self._within(self.config.control_deadline, lambda: f"{replica.url} to {what}"):
                return (await call(replica.spoken),)
        except (Unsent, Lost, Busy) as error:
            return ProviderError(str(error))
        except RamifyError as error:
            return error

    # -- the servers' health -------------------------------------------------------------------------------------------

    async def _first_meeting(self, replica: Replica) -> None:
        """Try until the server is up. What trying again cannot cure is raised."""
        while replica.state is State.DOWN:
            try:
                await self._join(replica)
            except RamifyError as error:
                replica.reason = f"{error.name}: {error.message}"
                if not error.retryable:
                    raise
                await asyncio.sleep(min(self.config.health_interval, 0.2))

    async def _watch(self, replica: Replica) -> None:
        """Look at one server's health, forever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.health_interval):
                    await replica.look.wait()
            replica.look.clear()
            try:
                await self._check(replica)
                if replica.state is State.DOWN:
                    await self._join(replica)
            except RamifyError as error:
                if replica.state is State.DOWN:
                    replica.reason = f"{error.name}: {error.message}"

    async def _check(self, replica: Replica) -> None:
        """Ask for health; enough failures in a row eject."""
        try:
            async with self._within(self.config.health_timeout, lambda: f"{replica.url}/health"):
                await exchange(replica.http, "GET", "/health")
                if replica.has_timed_requests:
                    await self._record_progress(replica)
        except (RamifyError, Unsent, Lost, Busy) as error:
            replica.failures += 1
            if replica.failures >= self.config.eject_after and replica.state is State.UP:
                self._pool.eject(replica, f"{replica.failures} health checks failed, the last: {error}")
                if self._pool.up:
                    replica.release_requests()
            raise ProviderError(str(error)) from error
        replica.failures = 0

    async def _record_progress(self, replica: Replica) -> None:
        """Record progress if the engine's counter of steps has moved, or if it has no such counter that can be read."""
        steps: float | None = None
        with contextlib.suppress(ProviderError, RequestInvalid, ValueError):  # no metrics, or none that are numbers
            steps = read_steps((await exchange(replica.http, "GET", "/metrics")).decode())
        if steps is None or steps != replica.steps:
            replica.record_progress()
        replica.steps = steps

    async def _join(self, replica: Replica) -> None:
        """Meet a server, bring it to everybody's weights and state, and let it in."""
        deadline = self._within(self.config.control_deadline, lambda: f"{replica.url} to join; is it paused?")
        async with deadline, self._control:
            try:
                spoken = await meet(replica, self._version)
                await catch_up(replica, spoken, self._update)
                if self._paused is not None:
                    await spoken.pause(self._paused)
            except (Unsent, Lost, Busy) as error:
                raise ProviderError(str(error)) from error
            replica.dialect = spoken
            self._pool.admit(replica)

    @contextlib.asynccontextmanager
    async def _within(self, seconds: float, awaited: Callable[[], str]) -> AsyncIterator[None]:
        """A deadline around a block; what was waited for is named when it passes."""
        try:
            async with asyncio.timeout(seconds) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"waited {seconds:g} s for {awaited()}") from error


async def _end(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
