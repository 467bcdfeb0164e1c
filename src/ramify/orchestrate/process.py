"""The orchestrator as a process: it holds the run's one store, and everybody it talks to may die.

    env servers <- Sampling -> Core (ledger) <- TrainerService <- trainer
                                 ^ applied
    engines <------------------ Weights <- published            Evaluating, status, watchdog beside them

Everything runs on one event loop, in one task group: whatever fails by a name nobody handles ends the run by that name.
"""

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ramify.client import Client, ClientConfig
from ramify.client.load import Load as EngineLoad
from ramify.envserver.client import EnvClient
from ramify.errors import (
    ConfigInvalid,
    PeerLost,
    RamifyError,
    RunStalled,
    TokenizerMismatch,
    TokensRequired,
    WorkerDied,
)
from ramify.infer.config import ExternalConfig
from ramify.infer.connect import open_client
from ramify.model.resolve import resolve
from ramify.model.version import Version
from ramify.orchestrate.concurrency import Concurrency, Load
from ramify.orchestrate.config import EvalSourceConfig, RunConfig, TrainSourceConfig
from ramify.orchestrate.core import Core
from ramify.orchestrate.evaluating import Evaluating
from ramify.orchestrate.judging import Rules, Source
from ramify.orchestrate.parts import load_mix, load_parts
from ramify.orchestrate.progress import Progress
from ramify.orchestrate.sampling import Sampling, Served
from ramify.orchestrate.service import TrainerService
from ramify.orchestrate.status import status_server
from ramify.orchestrate.tasks import MANY, TaskBook
from ramify.orchestrate.weights import Weights
from ramify.store import open_run
from ramify.store.journal import Journal
from ramify.store.ledger import Group, Ledger, StoredBatch
from ramify.store.states import State
from ramify.trace import Trace
from ramify.wire import Server

Log = Callable[[int, Mapping[str, float]], None]
Show = Callable[[int, Mapping[str, list[tuple[Trace, float | None]]]], None]

LOOK = 1.0  # seconds between two looks at the engines' load and at the run's progress
SLACK = 600.0  # seconds an attempt may wait for a worker beyond what it may take
CURVE = 40  # points of the reward curve that the status shows
LEFT = 75  # the exit code of a run that was asked to leave and can be continued


class Orchestrator:
    """One run. `run` it once; the result is the exit code.

    `log` is told the numbers of every step, `show` now and then a few rollouts of each source, with their advantages.
    """

    def __init__(self, config: RunConfig, *, log: Log | None = None, show: Show | None = None) -> None:
        self._log, self._show = log, show
        if not isinstance(config.inference, ExternalConfig):
            raise ConfigInvalid("inference: the orchestrator starts no engine; give it engine = 'external', base_url")
        for kind, sources in (("train", config.train), ("eval", config.eval)):
            for number, source in enumerate(sources):
                if source.address is None:
                    raise ConfigInvalid(f"{kind}.{number}.address: the orchestrator needs the env server's address")
        self.config, self.inference = config, config.inference
        self.policy = Path(config.model.name).name
        self.started = time.time()
        self._leave = asyncio.Event()
        self._due: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()
        self._loads: list[EngineLoad] = []

    async def run(self) -> int:
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                loop.add_signal_handler(number, self.leave)
            try:
                async with asyncio.TaskGroup() as together:
                    tasks = [
                        together.create_task(work, name=name)
                        for name, work in {
                            "sampling": self.sampling.run(),
                            "weights": self.weights.run(),
                            "watchdog": self._watch(),
                            "load": self._follow_load(),
                            "cutting": self._follow_cuts(),
                            "evals": self._evaluate(),
                        }.items()
                    ]
                    code = await self._until_over()
                    for task in tasks:
                        task.cancel()
            except BaseExceptionGroup as group:
                raise _first(group) from group
            return code

    def leave(self) -> None:
        """Make a checkpoint and end, to be continued."""
        self._leave.set()

    # -- the parts ---------------------------------------------------------------------------------------------------

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        parts = load_parts(config)
        self.store = open_run(config.path, config.identity)
        stack.callback(self.store.close)
        self.ledger, self.journal = Ledger.open(self.store), Journal(self.store)
        self.progress = Progress(self.journal, self._log)
        patience = ClientConfig(patience=config.launch.start_deadline)
        self.client: Client = await stack.enter_async_context(
            open_client(self.inference, config=patience, version=Version(self.policy))
        )
        train = {source.title: await self._served(source, stack) for source in config.train}
        evals = {source.title: (source, await self._served(source, stack)) for source in config.eval}
        counts = {name: served.count for name, (served, _) in train.items()}
        sources = {
            source.title: Source(
                name=source.title,
                algorithm=parts.algorithms[source.title],
                size=config.group_size(source),
                tries=source.attempts,
                temperature=source.sampling.temperature,
                group_rewards=frozenset(train[source.title][1].group_rewards),
                epoch=counts[source.title] if source.curriculum.type == "shuffle" else None,
            )
            for source in config.train
        }
        rules = Rules(self._vocabulary(), config.seq_len, parts.filters, config.orchestrator.min_group)
        shape = config.orchestrator.shape
        self.core = await Core.open(
            self.ledger, load_mix(config, counts), sources, rules, shape, last_step=config.max_steps
        )
        self._next, self._began_at = self.core.admission.step, self.core.marks.committed
        most = config.orchestrator.max_concurrency or shape.slots * max(source.size for source in sources.values())
        self.concurrency = Concurrency(min(most, config.orchestrator.batch_size), most)
        self.weights = Weights(self.client, self._applied)
        self.sampling = Sampling(
            self.core,
            {name: served for name, (served, _) in train.items()},
            seed=config.seed,
            limit=lambda: self.concurrency.limit,
            settled=self._settled,
            failed=self.progress.trouble,
        )
        self.evaluating = Evaluating(
            {name: (source, served[0]) for name, (source, served) in evals.items()},
            self.weights,
            self.store,
            seed=config.seed,
            report=self._evaluated,
            failed=self.progress.trouble,
            moved=self.progress.move,
        )
        self.evaluating.restore(self.journal.metrics("eval/*/avg"))
        self.service = TrainerService(
            self.core,
            self.weights,
            self.progress,
            policy=self.policy,
            steps=config.max_steps,
            replaced=self._replaced,
        )
        if self.core.marks.committed == 0 and all(version.step == 0 for version in self.client.versions.values()):
            self.sampling.open.set()  # the weights the run begins with; any later start waits for its trainer's
        server = Server(self.service.handlers, config.orchestrator.address, name="orchestrator")
        await stack.enter_async_context(server)
        answers = {"/status": self._status, "/why": lambda _: self.why(), "/metrics": self._metrics}
        self.status_address = await stack.enter_async_context(
            status_server(config.orchestrator.status, answers, self.leave)
        )
        self.journal.note("started", committed=self.core.marks.committed, incarnation=self.core.marks.incarnation)
        print(f"orchestrating {config.path} at {server.address}; status at {self.status_address}", flush=True)

    async def _served(
        self, source: TrainSourceConfig | EvalSourceConfig, stack: contextlib.AsyncExitStack
    ) -> tuple[Served, Any]:
        """Meet a source's server, which may still be booting, or be started again meanwhile."""
        assert source.address is not None
        patience = self.config.launch.start_deadline
        end = time.monotonic() + patience
        try:
            client = await EnvClient(source.address).start(patience)
        except PeerLost as error:
            raise PeerLost(f"the orchestrator waits for the env server of {source.title}: {error.message}") from error
        stack.push_async_callback(client.close)
        tasks, most = (
            TaskBook(source.title, client),
            MANY if isinstance(source, TrainSourceConfig) else source.num_tasks,
        )
        broken = False
        while True:
            try:
                health = await client.health()
                if health.state == "ok":
                    info, count = await client.info(), await tasks.count(most)
                    break
                broken = health.state == "broken"
                error = WorkerDied(f"the env server of {source.title} has no worker: {health.reason or health.state}")
            except RamifyError as failure:
                error = failure
            if not error.retryable or broken or time.monotonic() > end:
                raise error
            await asyncio.sleep(LOOK / 4)
        if isinstance(source, TrainSourceConfig) and not info.trainable:
            raise TokensRequired(f"train source {source.title}: its endpoint gives no token ids and logprobs")
        timeouts = source.timeouts
        agent = float(source.harness.get("timeout", 600.0))
        deadline = timeouts.boot + timeouts.setup + agent + timeouts.finalize + timeouts.scoring + SLACK
        served = Served(
            source.title, client, tasks, bool(info.group_rewards), deadline, source.attempts, patience, count
        )
        return served, info

    def _vocabulary(self) -> int:
        path = resolve(self.config.model.name) / "config.json"
        try:
            return int(json.loads(path.read_text())["vocab_size"])
        except (OSError, ValueError, KeyError) as error:
            raise TokenizerMismatch(f"{path} names no vocab_size: {error}") from error

    # -- what happens ------------------------------------------------------------------------------------------------

    def _settled(self, group: Group, traces: list[Trace], trainable: bool) -> None:
        self.progress.settled(group, traces, trainable)

    def _replaced(self) -> None:
        """A trainer begins from the history: nothing is sampled until the engines have what it begins with."""
        self.sampling.open.clear()
        self.weights.forget()

    def _applied(self, version: Version, seconds: float) -> None:
        """The engines have a version: slots are free, and an eval may be due."""
        if version.incarnation != self.core.marks.incarnation:
            return  # of a trainer that was replaced meanwhile
        self.core.applied(version.incarnation, version.step)
        self.progress.record(version.step, {"time/swap": seconds})
        self.sampling.open.set()
        self.sampling.wake()
        if names := self.evaluating.due(version.step):
            self._due.put_nowait((version.step, names))

    def _evaluated(self, step: int, values: dict[str, float]) -> None:
        self.progress.evals |= {name: {"step": step, "value": value} for name, value in values.items()}
        self.progress.record(step, values)
        told = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if name.endswith(("/avg", "/exact")))
        print(f"eval at step {step}: {told}", flush=True)

    async def _evaluate(self) -> None:
        """Evals as they fall due, the first with the weights the run begins with."""
        if self.sampling.open.is_set() and (names := self.evaluating.due(0)):
            self._due.put_nowait((0, names))
        while True:
            step, names = await self._due.get()
            await self.evaluating.run(step, names)
            self._due.task_done()

    async def _follow_cuts(self) -> None:
        while True:
            await self.sampling.cut.wait()
            self.sampling.cut.clear()
            for batch in self.ledger.batches(self._next):
                self._next = batch.step + 1
                self.progress.cut(batch.step, self._ages(batch))
                self._say(batch)
                self._show_some(batch)
            await self.service.announce()

    def _show_some(self, batch: StoredBatch) -> None:
        """A few rollouts of each source, out of the batch that was just decided."""
        samples = self.config.monitor.samples
        if self._show is None or not samples.count or batch.step % samples.interval:
            return
        shown: dict[str, list[tuple[Trace, float | None]]] = {}
        for number in batch.groups:
            rollouts = shown.setdefault(self.ledger.group(number).source, [])
            for attempt in self.ledger.attempts(number)[: samples.count - len(rollouts)]:
                if attempt.rollout is not None:
                    rollouts.append((self.store.read(attempt.rollout)[0], attempt.notes.get("advantage")))
        self._show(batch.step, shown)

    def _ages(self, batch: StoredBatch) -> list[int]:
        return [batch.step - self.ledger.group(number).version for number in batch.groups]

    def _say(self, batch: StoredBatch) -> None:
        last, rate = self.progress.last, self.progress.speed()
        k, n = self.progress.trainable
        print(
            f"step {batch.step}: reward {last.get('reward/all/mean', 0.0):.3f}, trainable {k}/{n}, "
            f"{rate[0]:.1f} rollouts/s, {rate[1]:.0f} tokens/s, staleness {last.get('staleness/mean', 0.0):.1f}",
            flush=True,
        )

    async def _follow_load(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._loads = await self.client.loads()
            if self._loads:
                worst = Load(max(load.cache for load in self._loads), sum(load.queued for load in self._loads))
                self.concurrency.observe(worst, self.sampling.out)
                self.sampling.wake()

    async def _watch(self) -> None:
        limit = self.config.orchestrator.stall_timeout
        while True:
            await asyncio.sleep(min(LOOK, limit / 4))
            if self.evaluating.running:
                self.progress.moved = max(self.progress.moved, *self.evaluating.running.values())
            if (idle := time.monotonic() - self.progress.moved) > limit:
                lines = [f"  {each['who']} waits for {each['waits_for']} ({each['detail']})" for each in self.why()]
                said = f"no step in {idle:.0f} s (orchestrator.stall_timeout is {limit:g})"
                report = "\n".join([said, *lines, f"  dropped groups: {self._dropped() or 'none'}"])
                with contextlib.suppress(OSError):  # a disk without room must not hide what stalled
                    (self.config.path / "stalled.txt").write_text(report + "\n")
                raise RunStalled(report)

    def _dropped(self) -> str:
        found = Counter(
            f"{group.reason.value}: {group.detail}" if group.reason else "?"
            for group in self.ledger.groups()
            if group.state is State.DROPPED
        )
        return ", ".join(f"{count} × {reason}" for reason, count in found.most_common(5))

    async def _until_over(self) -> int:
        """Until every step is in the history and the last eval is done, or the run was asked to leave."""
        leaving = asyncio.create_task(self._leave.wait())
        try:
            while not self.service.over:
                self.service.committed.clear()
                done = asyncio.create_task(self.service.committed.wait())
                await asyncio.wait({leaving, done}, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK)
                done.cancel()
                if leaving.done():
                    return await self._checkpoint_and_leave()
        finally:
            leaving.cancel()
        await self._last_evals()
        await self.core.finish()
        self.journal.note("finished", step=self.core.marks.committed)
        await self.service.announce()
        print(f"finished: {self.core.marks.committed} steps in {time.time() - self.started:.0f} s", flush=True)
        return 0

    async def _last_evals(self) -> None:
        """What the run has come to: the last version, once the engines have it."""
        last = self.core.marks.committed
        while self.weights.serving is None or self.weights.serving.step < last:
            if self.weights.waiting_since is None and self.weights.serving is not None:
                break  # nothing newer is coming
            await asyncio.sleep(LOOK / 4)
        await self._due.join()
        if names := self.evaluating.due(last, last=True):
            await self.evaluating.run(last, names)

    async def _checkpoint_and_leave(self) -> int:
        self.service.leaving = True
        self.service.committed.clear()
        await self.service.announce()
        if self.service.met and self.core.marks.acknowledged > self.core.marks.committed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.launch.grace):
                    await self.service.committed.wait()
        self.journal.note("left", committed=self.core.marks.committed)
        return LEFT

    # -- what is told ------------------------------------------------------------------------------------------------

    def why(self) -> list[dict[str, Any]]:
        """Who waits for what, since when."""
        now, found = time.monotonic(), []

        def wait(who: str, what: str, since: float, deadline: float | None, detail: str) -> None:
            found.append(
                {"who": who, "waits_for": what, "since_s": round(since, 1), "deadline_s": deadline, "detail": detail}
            )

        idle, limit = now - self.progress.moved, self.config.orchestrator.stall_timeout
        admission = self.core.admission
        if not self.sampling.open.is_set():
            wait(
                "sampling", "the trainer's first weights", idle, limit, "the engines serve other weights than the run's"
            )
        elif self.sampling.out:
            wait("sampling", f"{self.sampling.out} attempts", idle, limit, self._oldest())
        elif not admission.room:
            wait("sampling", "a free slot", idle, limit, f"{admission.active} of {admission.shape.slots} groups active")
        if not self.service.met:
            wait("orchestrator", "a trainer", idle, limit, "none has come yet")
        elif self.service.asking is not None:
            step, since = self.service.asking
            scored = f"{self.core.dispatch.waiting} attempts wait, groups {admission.waiting_for()[:5]} are not scored"
            wait("trainer", f"the batch of step {step}", now - since, limit, scored)
        elif self.core.marks.acknowledged < admission.step:
            wait("orchestrator", f"the trainer to do step {self.core.marks.acknowledged}", idle, limit, "")
        if self.weights.waiting_since is not None:
            detail = "an eval holds the weights" if self.weights.held else "the engines are being updated"
            wait("weights", "the engines to take a version", now - self.weights.waiting_since, None, detail)
        for name, since in self.evaluating.running.items():
            wait(f"eval {name}", "its rollouts", now - since, None, "")
        busy = sum(load.running for load in self._loads)
        if self.sampling.out and busy:
            urls = ", ".join(self.client.versions)
            wait("env servers", f"{busy} model calls", idle, limit, f"the engines at {urls} hold them")
        for url, reason in self.client.down.items():
            wait("client", f"the engine at {url}", idle, None, reason)
        return found

    def _oldest(self) -> str:
        """The attempt that keeps the run waiting."""
        if (found := self.sampling.oldest()) is None:
            return ""
        attempt, source, seconds = found
        served = self.sampling.sources[source]
        where = f"{source} at {served.client.address}, of at most {served.deadline:g} s"
        return f"the oldest is {attempt}, for {seconds:.0f} s at {where}"

    def _status(self, _: Request) -> dict[str, Any]:
        marks, progress, last = self.core.marks, self.progress, self.progress.last
        rollouts, tokens = progress.speed()
        done, steps = marks.acknowledged, self.config.max_steps
        spent = time.time() - self.started
        fresh = done - self._began_at
        eta = spent / fresh * (steps - done) if fresh > 0 else None
        return {
            "run": str(self.config.path),
            "step": done,
            "max_steps": steps,
            "committed": marks.committed,
            "incarnation": marks.incarnation,
            "state": "leaving" if self._leave.is_set() else "finished" if self.service.over else "running",
            "eta_s": eta,
            "reward": progress.rewards[-1] if progress.rewards else None,
            "reward_history": progress.rewards[-CURVE:],
            "rollouts_per_s": rollouts,
            "tokens_per_s": tokens,
            "staleness": {"mean": last.get("staleness/mean"), "max": last.get("staleness/max")},
            "trainable": list(progress.trainable),
            "groups": dict(Counter(group.state.value for group in self.ledger.groups())),
            "processes": {each["who"]: f"waits for {each['waits_for']}" for each in self.why()},
            "errors": list(progress.failures)[-5:],
            "failures": dict(progress.failed),
            "evals": progress.evals,
            "version": None if self.weights.serving is None else str(self.weights.serving),
        }

    def _metrics(self, request: Request) -> list[dict[str, Any]]:
        glob = request.query_params.get("name", "*")
        return [metric._asdict() for metric in self.journal.metrics() if fnmatchcase(metric.name, glob)]


def _first(error: BaseException) -> BaseException:
    """The failure with a name, where there is one among those that fell together."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_first(each) for each in error.exceptions]
    return next((each for each in found if isinstance(each, RamifyError)), found[0])
