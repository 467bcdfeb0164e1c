"""The env server: a broker that forwards each request to a worker, so that each request is answered exactly once.

If a worker is lost, its attempts are rerun on other workers. The number of reruns is bounded: a killed worker counts
against all its attempts, a hung one only against the rollout whose code blocked the event loop, if that is known. A
rollout whose agent has sent requests that blocked two workers fails with AgentFailed, because no third worker would
fare better.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from ramify.core.async_calls import AsyncService
from ramify.core.errors import AgentFailed, EnvironmentChanged, PeerLost, ProcessDied, RamifyError, RequestCancelled
from ramify.processes.prefork import PreforkClient
from ramify.processes.wire import IncomingRequest, LoopMonitor, WireMessage, WireServer
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.log import EnvServerLog
from ramify.rollout.envserver.messages import (
    AddressUpdate,
    CancelRequest,
    EnvServerHealth,
    EnvServerStats,
    InfoRequest,
    RolloutRequest,
    RolloutResponse,
    ScoreGroupRequest,
    TaskCount,
)
from ramify.rollout.envserver.worker_pool import WorkerPool

# A rollout that did not cause the losses is moved at most this many times `max_worker_crashes`.
MAX_MOVES_PER_CRASH = 10
MAX_AGENT_HANGS = 2  # workers that the requests of one rollout's agent may block
POLL_INTERVAL = 0.05


class EnvServer(AsyncService):
    """Serves one source. Use `start` and `close`, or `async with`.

    `counts` are the requests by method, `failures` the failed ones by error; `pool` and `log` exist after `start`.
    Several servers in one process can fork their workers from one fork server, with its client `prefork_client`.
    """

    def __init__(self, config: EnvServerConfig, *, prefork_client: PreforkClient | None = None) -> None:
        self.config, self.selected = config, config.select_source()
        self._prefork_client = prefork_client
        handlers = {
            "info": self._handle_info,
            "tasks": self._forward,
            "run": self._handle_run,
            "score_group": self._handle_score_group,
            "cancel": self._handle_cancel,
            "addresses": self._handle_addresses,
            "health": self._handle_health,
            "stats": self._handle_stats,
        }
        self._server = WireServer(
            {name: self._with_counters(name, handler) for name, handler in handlers.items()},
            self.selected.listen_address,
            secret=config.load_secret(),
            settings=config.wire_settings,
            name="env-server",
        )
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._tasks_by_rollout: dict[str, set[asyncio.Task[Any]]] = {}
        self._cancelled_tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._task_count: TaskCount | None = None

    @property
    def address(self) -> str:
        """The address of the server; its actual port is known after `start`."""
        return self._server.address

    async def wait_unreachable(self) -> None:
        """Wait until the server can no longer be reached."""
        await self._server.failed.wait()

    @property
    def log_path(self) -> Path:
        """The path of the log file."""
        return self.config.log_file or self.selected.log_path(self.config.output)

    async def start(self) -> Self:
        """Start the server and return when the first worker is ready.

        Raises ConfigInvalid or ProcessDied if no worker boots.
        """
        self._loop_monitor = LoopMonitor()
        self.log = EnvServerLog(self.log_path)
        self.log.log_event("serving", source=self.selected.key, pool=self.selected.config.pool)
        self.pool = WorkerPool(self.config, self.selected, self.log, self._loop_monitor, self._prefork_client)
        self._server.loop_monitor = self._loop_monitor
        try:
            await self._server.start()
        except BaseException:
            self._loop_monitor.stop()
            self.log.close()
            raise
        try:
            await self.pool.start()
        except BaseException:
            await self.close(grace=0)
            raise
        self.log.log_event("listening", address=self.address)
        return self

    async def close(self, grace: float | None = None) -> None:
        """Let running attempts finish for `grace` seconds, cancel the others, and stop the workers."""
        deadline = time.monotonic() + (self.config.shutdown_timeout if grace is None else grace)
        self._closing = True
        while self.pool.num_running + self.pool.num_waiting and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL)
        self.log.log_event("closing", cancelled_attempts=self.pool.num_running + self.pool.num_waiting)
        await self._server.close()
        await self.pool.close()
        self._loop_monitor.stop()
        self.log.log_event("closed")
        self.log.close()

    # -- request handlers ----------------------------------------------------------------------------------------------

    async def _handle_info(self, request: IncomingRequest) -> WireMessage:
        info = self.pool.info
        if info is None or not request.decode(InfoRequest).count_tasks:
            return WireMessage.encode(info)
        if self._task_count is None:
            self._task_count = (await self._forward(request, "count")).decode(TaskCount)
        return WireMessage.encode(msgspec.structs.replace(info, num_tasks=self._task_count.count))

    async def _handle_health(self, request: IncomingRequest) -> WireMessage:
        pool = self.pool
        workers = [worker.health() for worker in pool.workers.values()]
        state = "ok" if any(worker.state == "ready" for worker in workers) else "booting"
        state = "broken" if pool.boot_error is not None and state != "ok" else state
        return WireMessage.encode(
            EnvServerHealth(
                state="closing" if self._closing else state,
                reason=pool.boot_error.message if pool.boot_error is not None else "",
                running=pool.num_running,
                waiting=pool.num_waiting,
                workers=workers,
                deaths=list(pool.losses),
            )
        )

    async def _handle_stats(self, request: IncomingRequest) -> WireMessage:
        pool = self.pool
        return WireMessage.encode(
            EnvServerStats(
                uptime=time.monotonic() - pool.started_at,
                worst_lag=self._loop_monitor.max_lag,
                counts={
                    **self.counts,
                    **pool.counts,
                    "clients": self._server.num_clients,
                    "refused": self._server.num_rejected,
                },
                failures=dict(self.failures),
                decisions=list(pool.decisions),
                workers=[worker.health() for worker in pool.workers.values()],
                worker_lag=pool.worst_lag,
            )
        )

    async def _handle_cancel(self, request: IncomingRequest) -> WireMessage:
        tasks = [task for id in request.decode(CancelRequest).ids for task in self._tasks_by_rollout.get(id, ())]
        for task in tasks:
            self._cancelled_tasks.add(task)
            task.cancel()
        return WireMessage.encode(len(tasks))

    async def _handle_addresses(self, request: IncomingRequest) -> WireMessage:
        self.pool.update_addresses(request.decode(AddressUpdate))
        return WireMessage.encode()

    async def _forward(self, request: IncomingRequest, method: str | None = None) -> WireMessage:
        """Forward the request to any worker; if the worker is lost, try another."""
        method, deadline = method or request.header.method, time.monotonic() + request.timeout
        worker = None
        for _ in range(self.config.max_worker_crashes):
            worker = await self.pool.acquire()
            try:
                return await worker.client.call(method, request.message, timeout=deadline - time.monotonic())
            except (PeerLost, ProcessDied):
                continue
            finally:
                self.pool.release(worker)
        assert worker is not None  # `max_worker_crashes` is at least 1
        raise ProcessDied(
            f"{self.config.max_worker_crashes} workers were lost while they ran {method}; the last {worker.reason}"
        )

    async def _handle_score_group(self, request: IncomingRequest) -> WireMessage:
        self._check_environment(request.decode(ScoreGroupRequest).environment)
        return await self._forward(request)

    def _check_environment(self, expected: str) -> None:
        """Raise EnvironmentChanged if a request expects another environment than the loaded one."""
        info = self.pool.info
        if expected and info is not None and info.environment_digest != expected:
            raise EnvironmentChanged(
                f"the environment of {self.selected.key} was changed while it was in use: the run started with "
                f"{expected}, the env server has {info.environment_digest}; give the same command again, which lists "
                "the differences"
            )

    async def _handle_run(self, request: IncomingRequest) -> WireMessage:
        if self._closing:
            raise PeerLost("the env server is closing")
        rollout, current_task = request.decode(RolloutRequest), asyncio.current_task()
        assert current_task is not None
        self._check_environment(rollout.environment)
        tasks_with_id = self._tasks_by_rollout.setdefault(rollout.id, set())
        tasks_with_id.add(current_task)
        try:
            return await self._run_until_finished(rollout, request)
        except asyncio.CancelledError:
            if current_task not in self._cancelled_tasks:
                raise
            current_task.uncancel()
            raise RequestCancelled(f"rollout {rollout.id} was cancelled") from None
        finally:
            self._cancelled_tasks.discard(current_task)
            tasks_with_id.discard(current_task)
            if not tasks_with_id:
                del self._tasks_by_rollout[rollout.id]

    async def _run_until_finished(self, rollout: RolloutRequest, request: IncomingRequest) -> WireMessage:
        """Run an attempt on one worker after another until one finishes it."""
        deadline = time.monotonic() + request.timeout
        on_part = request.send_part if rollout.stream else None
        crashes = reruns = agent_hangs = 0
        while True:
            worker = await self.pool.acquire()
            try:
                timeout = deadline - time.monotonic()
                message = await worker.client.call("run", request.message, timeout=timeout, on_part=on_part)
                response = msgspec.structs.replace(message.decode(RolloutResponse), crashes=reruns)
                return WireMessage.encode(response, *message.blobs)
            except (PeerLost, ProcessDied):
                reruns += 1
                crashes += worker.hung_rollout_id in (None, rollout.id)
                agent_hangs += worker.hung_rollout_id == rollout.id and worker.is_hung_by_agent
                self.counts["reruns"] += 1
            finally:
                self.pool.release(worker)
            if agent_hangs >= MAX_AGENT_HANGS:
                raise AgentFailed(f"requests of {rollout.id} blocked {agent_hangs} workers; the last {worker.reason}")
            if (
                crashes >= self.config.max_worker_crashes
                or reruns >= MAX_MOVES_PER_CRASH * self.config.max_worker_crashes
            ):
                raise ProcessDied(f"{reruns} workers were lost while they ran {rollout.id}; the last {worker.reason}")

    def _with_counters(
        self, name: str, handler: Callable[[IncomingRequest], Awaitable[WireMessage]]
    ) -> Callable[[IncomingRequest], Awaitable[WireMessage]]:
        async def handle(request: IncomingRequest) -> WireMessage:
            self.counts[name] += 1
            try:
                response = await handler(request)
            except asyncio.CancelledError:
                self.failures["RequestCancelled"] += 1
                raise
            except RamifyError as error:
                self.failures[error.name] += 1
                raise
            self.counts[f"{name}_done"] += 1
            return response

        return handle
