"""The workers of a server: how many there are, who gets the next attempt, and who is given up.

Waiting attempts are served in order, each by the ready worker that has least to do. One look a heartbeat decides the
rest: hung workers are lost, old or large ones retire, and an elastic pool follows the load up at once and down after it
has been idle for a while. Every decision is kept with its reason.
"""

import asyncio
import math
import shutil
import time
import traceback
from collections import deque
from collections.abc import Coroutine
from itertools import count
from typing import Any

from ramify.envserver.config import ElasticConfig, EnvServerConfig, Picked
from ramify.envserver.log import Log
from ramify.envserver.messages import Death, Decision, Info, Told
from ramify.envserver.process import State, WorkerProcess, make_folder
from ramify.errors import EnvironmentChanged, RamifyError, WorkerDied
from ramify.wire import LoopMonitor, WireSettings

REMEMBERED = 256  # deaths and decisions
BACKOFF = 0.5  # seconds before a worker is started after one that failed to boot, doubled each time
SLOWEST = 30.0


class Pool:
    """All workers of one server."""

    def __init__(self, config: EnvServerConfig, picked: Picked, log: Log, pulse: LoopMonitor) -> None:
        self.config, self.log = config, log
        self._pool, self._pulse = picked.config.pool, pulse
        self._source = picked.config.source.model_dump(mode="json")
        self._kept = bool(picked.config.runtime.get("keep"))
        self.workers: dict[str, WorkerProcess] = {}
        self.deaths: deque[Death] = deque(maxlen=REMEMBERED)
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.counts = {"booted": 0, "lost": 0, "hung": 0, "recycled": 0, "boot_failures": 0}
        self.worst_lag: dict[str, float] = {}
        self.info: Info | None = None
        self.broken: RamifyError | None = None
        """Why no worker boots; None while one does or may."""
        self.began = time.monotonic()
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._pending = 0  # of those, the ones that nobody has answered or taken back
        self._ids = count(1)
        self._failures = 0  # boots in a row that failed
        self._not_before = 0.0
        self._surplus: float | None = None  # since when there are too many
        self._tasks: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()  # a worker is ready, or none will be
        self._closed = False

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the first worker is ready; raises why there is none."""
        self._folder = make_folder()
        self._balance("start")
        self._spawn(self._look())
        await self._first.wait()
        if self.broken is not None:
            raise self.broken

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._fail_waiting(WorkerDied("the env server is closing"))
        for task in list(self._tasks):
            if task.get_name() != "end":
                task.cancel()
        await asyncio.gather(*(worker.stop() for worker in list(self.workers.values())))
        if self._tasks:
            await asyncio.wait(self._tasks)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Attempts in the hands of workers."""
        return sum(worker.load for worker in self.workers.values())

    @property
    def waiting(self) -> int:
        """Attempts that no worker has."""
        return self._pending

    async def acquire(self) -> WorkerProcess:
        """A worker for one attempt, to be given back; waits for one in the order of asking."""
        if self.broken is not None and not self._ready():
            raise _error_for_attempt(self.broken)
        future: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._pending += 1
        future.add_done_callback(self._settled)
        self._assign()
        self._balance("load")
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def release(self, worker: WorkerProcess) -> None:
        """Give a worker back."""
        worker.load -= 1
        if worker.state is State.RETIRING and worker.load == 0:
            self._spawn(self._end(worker), "end")
        self._assign()

    def _ready(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.state is State.READY]

    def _assign(self) -> None:
        room = self._pool.multiplex if isinstance(self._pool, ElasticConfig) else math.inf
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            worker = min(self._ready(), key=lambda worker: worker.load, default=None)
            if worker is None or worker.load >= room:
                return
            worker.load += 1
            self._pending -= 1  # at once: an attempt is with a worker or waits, never both
            self._waiting.popleft().set_result(worker)

    def _settled(self, future: "asyncio.Future[WorkerProcess]") -> None:
        self._pending -= future.cancelled()

    def _fail_waiting(self, error: RamifyError) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self._pending -= 1
                future.set_exception(_error_for_attempt(error))

    # -- how many ------------------------------------------------------------------------------------------------------

    def _wanted(self) -> int:
        pool = self._pool
        if not isinstance(pool, ElasticConfig):
            return pool.workers
        needed = math.ceil((self.running + self.waiting) / pool.multiplex)
        return min(max(needed, pool.min), pool.most)

    def _balance(self, why: str) -> None:
        """Start workers that are missing."""
        now = time.monotonic()
        serving = [one for one in self.workers.values() if one.state in (State.BOOTING, State.READY)]
        wanted, before = self._wanted(), len(serving)
        if self._failures:  # one at a time, until one boots
            wanted = min(wanted, before + 1) if not any(one.state is State.BOOTING for one in serving) else before
        if self._closed or wanted <= before or now < self._not_before:
            return
        said = f"{why}: {self.running} running, {self.waiting} waiting"
        self._decide(before, wanted, said)
        for _ in range(wanted - before):
            worker = WorkerProcess(f"w{next(self._ids)}", self._folder, self.log, self._pulse, self._lost)
            self.workers[worker.id] = worker
            self._spawn(self._boot(worker))

    def _shrink(self, now: float) -> None:
        pool, ready = self._pool, self._ready()
        surplus = len(ready) - self._wanted() if isinstance(pool, ElasticConfig) else 0
        if surplus <= 0:
            self._surplus = None
            return
        self._surplus = self._surplus or now
        if isinstance(pool, ElasticConfig) and now - self._surplus >= pool.idle:
            self._surplus = None
            said = f"idle: for {pool.idle:g} s {surplus} of {len(ready)} had nothing to do"
            self._decide(len(ready), len(ready) - surplus, said)
            for worker in sorted(ready, key=lambda worker: worker.load)[:surplus]:
                self._retire(worker, "idle")

    def _decide(self, before: int, after: int, reason: str) -> None:
        self.decisions.append(Decision(time.monotonic() - self.began, before, after, reason))
        self.log.event(f"workers {before} -> {after}, {reason}")

    def _retire(self, worker: WorkerProcess, reason: str) -> None:
        worker.retire(reason)
        self.log.event(f"{worker.id} retires: {reason}")
        if worker.load == 0:
            self._spawn(self._end(worker), "end")

    # -- looking -------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat / 2)
            try:
                self._look_once()
            except Exception:  # noqa: BLE001 - whatever one look met, the next must come: nobody else sees a hang
                self.log.event(traceback.format_exc())

    def _look_once(self) -> None:
        for worker in list(self.workers.values()):
            if (why := worker.hung(self.config.hang_timeout)) is not None:
                self.counts["hung"] += 1
                worker.lose(why)
            self.worst_lag[worker.id] = worker.worst_lag
        for worker in self._ready():
            self._recycle(worker)
        self._shrink(time.monotonic())
        self._balance("replace")

    def _recycle(self, worker: WorkerProcess) -> None:
        config, reason = self.config, ""
        if config.max_age is not None and worker.age > config.max_age:
            reason = f"it is older than {config.max_age:g} s"
        elif config.max_memory is not None and worker.memory > config.max_memory:
            reason = f"it holds {worker.memory:.0f} MiB, more than {config.max_memory:g}"
        if reason:
            self.counts["recycled"] += 1
            self._retire(worker, reason)

    # -- birth and death -----------------------------------------------------------------------------------------------

    async def _boot(self, worker: WorkerProcess) -> None:
        config = self.config
        patience = max(60.0, 2 * config.hang_timeout)
        settings = WireSettings(
            heartbeat_interval=config.heartbeat, server_timeout=patience, max_open_requests=max(config.queue, 1) * 2
        )
        told = Told(id=worker.id, source=self._source, config=config.model_dump(mode="json"), secret="")
        try:
            await worker.boot(told, settings, private_temp=not self._kept, deadline=config.boot_timeout)
            self._check_environment(worker)
        except (RamifyError, OSError) as error:
            worker.state = State.LOST  # before `bury` waits: a worker that was ready must not be given work
            await worker.bury()
            self.workers.pop(worker.id, None)
            self._failed(worker, error if isinstance(error, RamifyError) else WorkerDied(f"{worker.id}: {error}"))
            return
        self.counts["booted"] += 1
        self._failures, self.broken = 0, None
        self.info = worker.info
        self.log.event(f"{worker.id} is ready, process {worker.pid}, after {worker.age:.1f} s")
        self._first.set()
        self._assign()

    def _check_environment(self, worker: WorkerProcess) -> None:
        """Refuse a worker that has loaded another version of the environment than those before it."""
        if self.info is None or worker.info is None or worker.info.environment == self.info.environment:
            return
        before, now = (info.environment.get("code", {}) for info in (self.info, worker.info))
        files = sorted(file for file in {*before, *now} if before.get(file) != now.get(file))
        raise EnvironmentChanged(
            f"the environment was changed while it was in use: {', '.join(files) or 'its configuration'}; "
            f"restore it, or stop the run and give the same command again, which lists the differences and the options"
        )

    def _failed(self, worker: WorkerProcess, error: RamifyError) -> None:
        """A worker did not boot."""
        self._failures += 1
        self.counts["boot_failures"] += 1
        self._not_before = time.monotonic() + min(BACKOFF * 2 ** (self._failures - 1), SLOWEST)
        self.deaths.append(Death(worker.id, time.monotonic() - self.began, f"did not boot: {error.message}", 0))
        self.log.event(f"{worker.id} did not boot: {error.name}: {error.message}")
        if self._failures < self.config.boot_attempts and error.retryable:
            return
        if error.retryable:
            said = f"{self._failures} workers in a row did not boot; the last: {error.name}: {error.message}"
            error = WorkerDied(said)
        self.broken = error
        self._first.set()
        if not self._ready():
            self._fail_waiting(error)

    def _lost(self, worker: WorkerProcess) -> None:
        """A worker that was ready is gone against its will."""
        self.workers.pop(worker.id, None)
        self.counts["lost"] += 1
        self.deaths.append(Death(worker.id, time.monotonic() - self.began, worker.reason, worker.load))
        self.log.event(f"{worker.id} is lost with {worker.load} attempts in hand: {worker.reason}")
        self._spawn(worker.bury(), "end")
        if not self._closed:
            self._balance("replace")

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.stop()
        if self.workers.pop(worker.id, None) is not None:
            self.log.event(f"{worker.id} has stopped: {worker.reason}")
            self._assign()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str = "pool") -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spent)

    def _spent(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.event("".join(traceback.format_exception(error)))


def _error_for_attempt(broken: RamifyError) -> RamifyError:
    """Return the error that is raised for an attempt if the pool has no worker and will get none."""
    return type(broken)(broken.message) if isinstance(broken, EnvironmentChanged) else WorkerDied(broken.message)
