"""The workers of a server: assigns attempts to workers, replaces lost workers and scales the pool.

Waiting attempts are served in order, each by the ready worker with the lowest load. A monitor loop checks all workers
twice per heartbeat: hung workers are marked lost, old or large ones retire, and an elastic pool grows at once with the
load and shrinks after it has had surplus workers for a while. Every decision is recorded with its reason.
"""

import asyncio
import contextlib
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import Any

from ramify.core.errors import EnvironmentChanged, PeerLost, ProcessDied, RamifyError
from ramify.env.chat_client import set_model_address
from ramify.processes.interpreter import find_other_interpreter
from ramify.processes.prefork import PreforkClient, start_prefork_server
from ramify.processes.wire import LoopMonitor, WireMessage, WireSettings
from ramify.rollout.envserver.config import ElasticPoolConfig, EnvServerConfig, SelectedSource
from ramify.rollout.envserver.log import EnvServerLog
from ramify.rollout.envserver.messages import AddressUpdate, EnvServerInfo, ScalingDecision, WorkerLoss, WorkerSpec
from ramify.rollout.envserver.worker_process import PRELOAD_MODULES, WorkerProcess, WorkerState

MAX_HISTORY = 256  # recorded losses and decisions
INITIAL_BACKOFF = 0.5  # seconds before the next start after a failed boot, doubled for each further one
MAX_BACKOFF = 30.0
BUSY_WORKER_LOAD = 32  # attempts of a worker above which another is started: replies of a group end together


class WorkerPool:
    """All workers of one server.

    `workers` are those that exist now, by id; `losses` and `decisions` the most recent ones; `info` describes the
    environment as the first ready worker reported it; `worst_lag` is the longest pause of each worker's event loop.
    Workers are forked by `prefork_client` or, without one, by a fork server of the pool, if it may have several.
    """

    def __init__(
        self,
        config: EnvServerConfig,
        selected: SelectedSource,
        log: EnvServerLog,
        loop_monitor: LoopMonitor,
        prefork_client: PreforkClient | None = None,
    ) -> None:
        self.config, self.log = config, log
        self._pool_config, self._loop_monitor = selected.config.pool, loop_monitor
        self._source_config = selected.config.source_config.model_dump(mode="json")
        self._python: Path | None = None  # the interpreter of the workers, if it is not this one
        self._prefork_client, self._fork_server = prefork_client, contextlib.ExitStack()
        self._keeps_sandboxes = bool(selected.config.runtime.get("keep_workdir"))
        self.workers: dict[str, WorkerProcess] = {}
        self.losses: deque[WorkerLoss] = deque(maxlen=MAX_HISTORY)
        self.decisions: deque[ScalingDecision] = deque(maxlen=MAX_HISTORY)
        self.counts = {"booted": 0, "lost": 0, "hung": 0, "recycled": 0, "boot_failures": 0}
        self.worst_lag: dict[str, float] = {}
        self.info: EnvServerInfo | None = None
        self._addresses: AddressUpdate | None = None  # all that have replaced configured ones
        self._boot_urls: dict[str, list[str]] = {}  # the inference servers that a worker was booted with
        self.boot_error: RamifyError | None = None
        """Why workers fail to boot; None unless `max_startup_failures` boots in a row have failed."""
        self.started_at = time.monotonic()
        self._waiters: deque[asyncio.Future[WorkerProcess]] = deque()
        self.num_waiting = 0  # attempts that have neither a worker nor been cancelled
        self._ids = count(1)
        self._boot_failures_in_a_row = 0
        self._next_boot_at = 0.0
        self._surplus_since: float | None = None  # since when there are more workers than needed
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_boot_done = asyncio.Event()  # a worker is ready, or booting has failed for good
        self._closed = False

    # -- start and close -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start workers and return when the first is ready. Raises the boot error if there is none."""
        self._temp_root = Path(tempfile.mkdtemp(prefix="ramify-env-"))  # of all workers
        self._python = await asyncio.to_thread(find_other_interpreter, self._source_config["python"])
        pool = self._pool_config
        max_workers = pool.worker_limit if isinstance(pool, ElasticPoolConfig) else pool.workers
        if self._prefork_client is None and self._python is None and max_workers > 1:
            with contextlib.suppress(OSError):  # workers are then started directly, which has a named failure
                self._prefork_client = self._fork_server.enter_context(start_prefork_server(PRELOAD_MODULES, {}))
        self._scale_up("start")
        self._create_task(self._monitor_loop())
        await self._first_boot_done.wait()
        if self.boot_error is not None:
            raise self.boot_error

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._fail_waiters(ProcessDied("the env server is closing"))
        for task in list(self._tasks):
            if task.get_name() != "end":
                task.cancel()
        await asyncio.gather(*(worker.stop() for worker in list(self.workers.values())))
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.workers.clear()  # a cancelled boot does not remove its worker from the dict; its process was stopped above
        self._fork_server.close()
        shutil.rmtree(self._temp_root, ignore_errors=True)

    # -- assignment of attempts ----------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """The number of attempts that run on workers."""
        return sum(worker.load for worker in self.workers.values())

    async def acquire(self) -> WorkerProcess:
        """Wait for a worker, first come first served, and return it. The caller must `release` it after its attempt."""
        if self.boot_error is not None and not self._ready_workers():
            raise _attempt_error(self.boot_error)
        future: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self.num_waiting += 1
        future.add_done_callback(self._on_waiter_done)
        self._assign_waiters()
        self._scale_up("load")
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def release(self, worker: WorkerProcess) -> None:
        """Return a worker after an attempt."""
        worker.load -= 1
        if worker.state is WorkerState.RETIRING and worker.load == 0:
            self._create_task(self._stop_worker(worker), "end")
        self._assign_waiters()

    def _ready_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.state is WorkerState.READY]

    def _assign_waiters(self) -> None:
        capacity = self._pool_config.multiplex if isinstance(self._pool_config, ElasticPoolConfig) else math.inf
        while self._waiters:
            if self._waiters[0].done():
                self._waiters.popleft()
                continue
            worker = min(self._ready_workers(), key=lambda worker: worker.load, default=None)
            if worker is None or worker.load >= capacity:
                return
            worker.load += 1
            self.num_waiting -= 1  # here, not in the callback: an attempt must never count as both running and waiting
            self._waiters.popleft().set_result(worker)

    def _on_waiter_done(self, future: "asyncio.Future[WorkerProcess]") -> None:
        self.num_waiting -= future.cancelled()

    def _fail_waiters(self, error: RamifyError) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                self.num_waiting -= 1
                future.set_exception(_attempt_error(error))

    # -- addresses -----------------------------------------------------------------------------------------------------

    def update_addresses(self, update: AddressUpdate) -> None:
        """Let all workers, and those that are started later, use new addresses of inference servers."""
        if self._addresses is not None:
            inference = self._addresses.inference if update.inference is None else update.inference
            update = AddressUpdate(inference, {**self._addresses.models, **update.models})
        if update == self._addresses:
            return
        self._addresses = update
        self.log.log_event("new addresses", inference=update.inference, models=update.models)
        for name, urls in update.models.items():
            set_model_address(name, urls)  # workers inherit the environment of this process
        for worker in self.workers.values():
            if worker.state is not WorkerState.BOOTING:
                self._create_task(self._send_addresses(worker, update))
            elif update.inference and {*update.inference}.isdisjoint(self._boot_urls.get(worker.id, update.inference)):
                worker.abort_boot("was stopped because its inference servers have moved")

    async def _send_addresses(self, worker: WorkerProcess, update: AddressUpdate) -> None:
        """Send addresses to a worker. A worker whose event loop is blocked gets them when it continues."""
        with contextlib.suppress(PeerLost, ProcessDied):
            await worker.client.call("addresses", WireMessage.encode(update), timeout=2 * self.config.hang_timeout)

    # -- scaling -------------------------------------------------------------------------------------------------------

    def _target_size(self) -> int:
        pool = self._pool_config
        if not isinstance(pool, ElasticPoolConfig):
            return pool.workers
        needed = math.ceil((self.num_running + self.num_waiting) / min(pool.multiplex, BUSY_WORKER_LOAD))
        return min(max(needed, pool.min_workers), pool.worker_limit)

    def _scale_up(self, trigger: str) -> None:
        """Start as many workers as are missing. `trigger` is recorded as the reason."""
        num_booting = sum(worker.state is WorkerState.BOOTING for worker in self.workers.values())
        target, before = self._target_size(), num_booting + len(self._ready_workers())
        if self._boot_failures_in_a_row:  # after a failed boot, start one at a time until one succeeds
            target = before if num_booting else min(target, before + 1)
        if self._closed or target <= before or time.monotonic() < self._next_boot_at:
            return
        reason = f"{trigger}: {self.num_running} running, {self.num_waiting} waiting"
        self._record_decision(before, target, reason)
        for _ in range(target - before):
            id = f"w{next(self._ids)}"
            worker = WorkerProcess(
                id,
                self._temp_root,
                self.log,
                self._loop_monitor,
                self._on_worker_lost,
                self._python,
                self._prefork_client,
            )
            self.workers[worker.id] = worker
            self._create_task(self._boot_worker(worker))

    def _scale_down(self, now: float) -> None:
        """Retire the workers of an elastic pool that have not been needed for `idle_timeout` seconds."""
        pool, ready = self._pool_config, self._ready_workers()
        if not isinstance(pool, ElasticPoolConfig):
            return
        surplus = len(ready) - self._target_size()
        if surplus <= 0:
            self._surplus_since = None
            return
        self._surplus_since = self._surplus_since or now
        if now - self._surplus_since >= pool.idle_timeout:
            self._surplus_since = None
            reason = f"idle: {surplus} of {len(ready)} workers were not needed for {pool.idle_timeout:g} s"
            self._record_decision(len(ready), len(ready) - surplus, reason)
            for worker in sorted(ready, key=lambda worker: worker.load)[:surplus]:
                self._retire_worker(worker, "idle")

    def _record_decision(self, before: int, after: int, reason: str) -> None:
        self.decisions.append(ScalingDecision(time.monotonic() - self.started_at, before, after, reason))
        self.log.log_event("pool scaled", workers_before=before, workers_after=after, reason=reason)

    def _retire_worker(self, worker: WorkerProcess, reason: str) -> None:
        worker.retire(reason)
        self.log.log_event("worker retires", worker=worker.id, reason=reason)
        if worker.load == 0:
            self._create_task(self._stop_worker(worker), "end")

    # -- monitoring ----------------------------------------------------------------------------------------------------

    async def _monitor_loop(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_interval / 2)
            try:
                self._check_workers()
            except Exception as error:  # noqa: BLE001 - the loop must go on: nothing else detects hangs
                self.log.log_exception(error)

    def _check_workers(self) -> None:
        for worker in list(self.workers.values()):
            if (reason := worker.check_hang(self.config.hang_timeout)) is not None:
                self.counts["hung"] += 1
                worker.mark_lost(reason)
            self.worst_lag[worker.id] = worker.worst_lag
        for worker in self._ready_workers():
            self._retire_if_expired(worker)
        self._scale_down(time.monotonic())
        self._scale_up("replace")

    def _retire_if_expired(self, worker: WorkerProcess) -> None:
        config, reason = self.config, ""
        if config.max_age is not None and worker.age > config.max_age:
            reason = f"it is older than {config.max_age:g} s"
        elif config.max_memory_mib is not None and worker.memory > config.max_memory_mib:
            reason = f"it uses {worker.memory:.0f} MiB, more than {config.max_memory_mib:g}"
        if reason:
            self.counts["recycled"] += 1
            self._retire_worker(worker, reason)

    # -- boot and loss of workers --------------------------------------------------------------------------------------

    async def _boot_worker(self, worker: WorkerProcess) -> None:
        config = self.config
        settings = WireSettings(
            heartbeat_interval=config.heartbeat_interval,
            server_timeout=max(60.0, 2 * config.hang_timeout),
            max_open_requests=2 * config.max_open_requests,
        )
        if self._addresses is not None and self._addresses.inference:
            inference = config.inference.model_copy(update={"base_url": self._addresses.inference})
            config = config.model_copy(update={"inference": inference})
        self._boot_urls[worker.id] = config.inference.base_url
        spec = WorkerSpec(id=worker.id, source=self._source_config, config=config.model_dump(mode="json"), secret="")
        try:
            await worker.boot(
                spec, settings, private_temp=not self._keeps_sandboxes, timeout=config.worker_startup_timeout
            )
            self._check_environment(worker)
        except (RamifyError, OSError) as error:
            worker.state = WorkerState.LOST  # before `reap` waits: it must not be assigned an attempt
            await worker.reap()
            self.workers.pop(worker.id, None)
            if worker.is_boot_aborted:
                self._scale_up("new addresses")
                return
            boot_error = error if isinstance(error, RamifyError) else ProcessDied(f"{worker.id}: {error}")
            self._on_boot_failed(worker, boot_error)
            return
        finally:
            self._boot_urls.pop(worker.id, None)
        self.counts["booted"] += 1
        self._boot_failures_in_a_row, self.boot_error = 0, None
        self.info = worker.info
        if self._addresses is not None:  # they may have changed while it booted
            self._create_task(self._send_addresses(worker, self._addresses))
        self.log.log_event("worker ready", worker=worker.id, pid=worker.pid, seconds=worker.age)
        self._first_boot_done.set()
        self._assign_waiters()

    def _check_environment(self, worker: WorkerProcess) -> None:
        """Raise EnvironmentChanged if a worker has loaded another version of the environment than those before it."""
        if self.info is None or worker.info is None or worker.info.environment == self.info.environment:
            return
        before, now = (info.environment.get("code", {}) for info in (self.info, worker.info))
        files = sorted(file for file in {*before, *now} if before.get(file) != now.get(file))
        raise EnvironmentChanged(
            f"the environment was changed while it was in use: {', '.join(files) or 'its configuration'}; "
            "restore it, or stop the run and give the same command again, which lists the differences and the options"
        )

    def _on_boot_failed(self, worker: WorkerProcess, error: RamifyError) -> None:
        """Record a failed boot; after too many in a row, fail the waiting attempts."""
        self._boot_failures_in_a_row += 1
        self.counts["boot_failures"] += 1
        now, backoff = time.monotonic(), INITIAL_BACKOFF * 2 ** (self._boot_failures_in_a_row - 1)
        self._next_boot_at = now + min(backoff, MAX_BACKOFF)
        self.losses.append(WorkerLoss(worker.id, now - self.started_at, f"did not boot: {error.message}", 0))
        self.log.log_event("worker failed to boot", worker=worker.id, error=error.name, message=error.message)
        if self._boot_failures_in_a_row < self.config.max_startup_failures and error.retryable:
            return
        if error.retryable:
            count = self._boot_failures_in_a_row
            error = ProcessDied(f"{count} workers in a row did not boot; the last: {error.name}: {error.message}")
        self.boot_error = error
        self._first_boot_done.set()
        if not self._ready_workers():
            self._fail_waiters(error)

    def _on_worker_lost(self, worker: WorkerProcess) -> None:
        """Record the loss of a worker, and replace it."""
        self.workers.pop(worker.id, None)
        self.counts["lost"] += 1
        self.losses.append(WorkerLoss(worker.id, time.monotonic() - self.started_at, worker.reason, worker.load))
        self.log.log_event("worker lost", worker=worker.id, attempts=worker.load, reason=worker.reason)
        self._create_task(worker.reap(), "end")
        if not self._closed:
            self._scale_up("replace")

    async def _stop_worker(self, worker: WorkerProcess) -> None:
        await worker.stop()
        if self.workers.pop(worker.id, None) is not None:
            self.log.log_event("worker stopped", worker=worker.id, reason=worker.reason)
            self._assign_waiters()

    def _create_task(self, coroutine: Coroutine[Any, Any, None], name: str = "pool") -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.log_exception(error)


def _attempt_error(boot_error: RamifyError) -> RamifyError:
    """Return the error for an attempt if workers fail to boot."""
    error_class = EnvironmentChanged if isinstance(boot_error, EnvironmentChanged) else ProcessDied
    return error_class(boot_error.message)
