"""The env server: one address, behind it a broker that hands every request to a worker and sees it answered once.

An attempt whose worker is lost runs again elsewhere. How often is bounded: a worker that was killed counts against all
that it held, one that hung against the rollout whose code stood still, as far as that is known.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from ramify.envserver.config import ADDRESS, EnvServerConfig
from ramify.envserver.log import Log
from ramify.envserver.messages import Cancel, Describe, Done, Health, Run, ScoreGroup, Stats, TaskCount, Turn
from ramify.envserver.pool import Pool
from ramify.envserver.process import WorkerProcess
from ramify.errors import EnvironmentChanged, PeerLost, RamifyError, RequestCancelled, WorkerDied
from ramify.wire import IncomingRequest, LoopMonitor, WireMessage, WireServer

INNOCENT = 10  # times `crashes` that a rollout may be moved without being to blame
POLL = 0.05


class EnvServer:
    """One source, served; `start` and `close` (or `async with`) are its life."""

    def __init__(self, config: EnvServerConfig) -> None:
        self.config, self.picked = config, config.pick()
        handlers = {
            "info": self._info,
            "tasks": self._forwarded,
            "run": self._run,
            "score_group": self._score_group,
            "cancel": self._cancel,
            "health": self._health,
            "stats": self._stats,
        }
        self._front = WireServer(
            {name: self._counted(name, handler) for name, handler in handlers.items()},
            self.picked.config.address or ADDRESS,
            secret=config.secret(),
            settings=config.settings,
            name="env-server",
        )
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._runs: dict[str, set[asyncio.Task[Any]]] = {}
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._counted_tasks: TaskCount | None = None

    @property
    def address(self) -> str:
        """Where it listens; the real one once it has started."""
        return self._front.address

    async def wait_broken(self) -> None:
        """Returns if the server can no longer be reached."""
        await self._front.failed.wait()

    @property
    def log_path(self) -> Path:
        return self.picked.log(self.config.output)

    async def start(self) -> Self:
        """Returns when the first worker is ready; raises ConfigInvalid or WorkerDied if none will be."""
        self._pulse = LoopMonitor()
        self.log = Log(self.log_path)
        self.log.event(f"serving {self.picked.name}, pool {self.picked.config.pool}")
        self.pool = Pool(self.config, self.picked, self.log, self._pulse)
        self._front.loop_monitor = self._pulse
        try:
            await self._front.start()
        except BaseException:
            self._pulse.stop()
            self.log.close()
            raise
        try:
            await self.pool.start()
        except BaseException:
            await self.close(grace=0)
            raise
        self.log.event(f"listening at {self.address}")
        return self

    async def close(self, grace: float | None = None) -> None:
        """Let what is in flight finish for `grace` seconds, cancel the rest, stop the workers."""
        end = time.monotonic() + (self.config.grace if grace is None else grace)
        self._closing = True
        while self.pool.running + self.pool.waiting and time.monotonic() < end:
            await asyncio.sleep(POLL)
        self.log.event(f"closing, {self.pool.running + self.pool.waiting} attempts are cancelled")
        await self._front.close()
        await self.pool.close()
        self._pulse.stop()
        self.log.event("closed")
        self.log.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- methods -------------------------------------------------------------------------------------------------------

    async def _info(self, request: IncomingRequest) -> WireMessage:
        info = self.pool.info
        if info is None or not request.decode(Describe).count_tasks:
            return WireMessage.encode(info)
        if self._counted_tasks is None:
            self._counted_tasks = (await self._forwarded(request, "count")).decode(TaskCount)
        return WireMessage.encode(msgspec.structs.replace(info, num_tasks=self._counted_tasks.count))

    async def _health(self, request: IncomingRequest) -> WireMessage:
        pool = self.pool
        workers = [worker.health() for worker in pool.workers.values()]
        state = "ok" if any(worker.state == "ready" for worker in workers) else "booting"
        state = "broken" if pool.broken is not None and state != "ok" else state
        return WireMessage.encode(
            Health(
                state="closing" if self._closing else state,
                reason=pool.broken.message if pool.broken is not None else "",
                running=pool.running,
                waiting=pool.waiting,
                workers=workers,
                deaths=list(pool.deaths),
            )
        )

    async def _stats(self, request: IncomingRequest) -> WireMessage:
        pool = self.pool
        return WireMessage.encode(
            Stats(
                uptime=time.monotonic() - pool.began,
                worst_lag=self._pulse.max_lag,
                counts={
                    **self.counts,
                    **pool.counts,
                    "clients": self._front.num_clients,
                    "refused": self._front.num_rejected,
                },
                failures=dict(self.failures),
                decisions=list(pool.decisions),
                workers=[worker.health() for worker in pool.workers.values()],
                worker_lag=pool.worst_lag,
            )
        )

    async def _cancel(self, request: IncomingRequest) -> WireMessage:
        found = [task for id in request.decode(Cancel).ids for task in self._runs.get(id, ())]
        for task in found:
            self._cancelled.add(task)
            task.cancel()
        return WireMessage.encode(len(found))

    async def _forwarded(self, request: IncomingRequest, method: str | None = None) -> WireMessage:
        """Let any worker answer; a worker that is lost meanwhile is followed by another."""
        method, end = method or request.header.method, time.monotonic() + request.left
        for _ in range(self.config.crashes):
            worker = await self.pool.acquire()
            try:
                return await worker.client.call(method, request.message, timeout=end - time.monotonic())
            except (PeerLost, WorkerDied):
                continue
            finally:
                self.pool.release(worker)
        raise WorkerDied(f"{self.config.crashes} workers were lost under {method}; the last {worker.reason}")

    async def _score_group(self, request: IncomingRequest) -> WireMessage:
        self._check_environment(request.decode(ScoreGroup).environment)
        return await self._forwarded(request)

    def _check_environment(self, expected: str) -> None:
        """Raise EnvironmentChanged if a request expects another version of the environment than this server loaded."""
        info = self.pool.info
        if expected and info is not None and info.digest != expected:
            raise EnvironmentChanged(
                f"the environment of {self.picked.name} was changed while it was in use: the run began with {expected} "
                f"and the env server has {info.digest}; give the same command again, which lists the differences"
            )

    async def _run(self, request: IncomingRequest) -> WireMessage:
        if self._closing:
            raise PeerLost("the env server is closing")
        ask, this = request.decode(Run), asyncio.current_task()
        assert this is not None
        self._check_environment(ask.environment)
        same = self._runs.setdefault(ask.id, set())
        same.add(this)
        try:
            return await self._attempts(ask, request)
        except asyncio.CancelledError:
            if this not in self._cancelled:
                raise
            this.uncancel()
            raise RequestCancelled(f"rollout {ask.id} was cancelled") from None
        finally:
            self._cancelled.discard(this)
            same.discard(this)
            if not same:
                del self._runs[ask.id]

    async def _attempts(self, ask: Run, request: IncomingRequest) -> WireMessage:
        """Run an attempt on one worker after another until one has finished it."""
        end = time.monotonic() + request.left
        crashes = moves = 0
        while True:
            worker = await self.pool.acquire()
            try:
                answer = await self._on(worker, ask, request, end)
                done = msgspec.structs.replace(answer.decode(Done), crashes=moves)
                return WireMessage.encode(done, *answer.blobs)
            except (PeerLost, WorkerDied):
                moves += 1
                crashes += worker.guilty in (None, ask.id)
                self.counts["reruns"] += 1
            finally:
                self.pool.release(worker)
            if crashes >= self.config.crashes or moves >= INNOCENT * self.config.crashes:
                raise WorkerDied(f"{moves} workers were lost under rollout {ask.id}; the last {worker.reason}")

    async def _on(self, worker: WorkerProcess, ask: Run, request: IncomingRequest, end: float) -> WireMessage:
        def forward(part: WireMessage) -> None:
            ask.start = max(ask.start, part.decode(Turn).start + 1)
            request.send_part(part)

        message = WireMessage.encode(ask)  # its start is where the last worker was lost
        on_part = forward if ask.stream else None
        return await worker.client.call("run", message, timeout=end - time.monotonic(), on_part=on_part)

    def _counted(
        self, name: str, handler: Callable[[IncomingRequest], Awaitable[WireMessage]]
    ) -> Callable[[IncomingRequest], Awaitable[WireMessage]]:
        async def counted(request: IncomingRequest) -> WireMessage:
            self.counts[name] += 1
            try:
                answer = await handler(request)
            except asyncio.CancelledError:
                self.failures["RequestCancelled"] += 1
                raise
            except RamifyError as error:
                self.failures[error.name] += 1
                raise
            self.counts[f"{name}_done"] += 1
            return answer

        return counted
