"""Carries out what the core decides about sampling: sends attempts to env servers, brings back what came of them.

Every attempt is a task of its own that ends in exactly one call of the core, which is never cut short. What an env
server could not do is a failure like any other; a server that is gone is asked again, by the same rule.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.env.task import compute_content_digest
from ramify.envserver.client import EnvClient
from ramify.errors import EnvironmentChanged, Failure, RamifyError
from ramify.orchestrate.core import Core
from ramify.orchestrate.dispatch import Order
from ramify.orchestrate.groups import Standing
from ramify.orchestrate.judging import rollout_id
from ramify.orchestrate.tasks import TaskBook
from ramify.store.group_state import DropReason
from ramify.store.ledger import GroupRecord
from ramify.store.summary import REVISION_KEY, UNRECORDED_REVISION, summarize_rollout
from ramify.trace import Trace

PAUSE = 1.0  # seconds before an attempt is sent again to a server that did not answer
AWAY = ("PeerLost", "WorkerDied")  # failures of the server rather than of the attempt


@dataclass(frozen=True, slots=True)
class Served:
    """A source as the orchestrator reaches it."""

    name: str
    client: EnvClient
    tasks: TaskBook
    compares: bool  # whether it has rewards that only a whole group can have
    deadline: float  # seconds one attempt may take, its waiting included, at a task without a limit of its own
    tries: int  # how often an attempt is made
    patience: float  # seconds for its server to be back
    count: int | None = None  # of its tasks; None if there is no end of them
    environment: str = ""  # the digest of the environment, as it was checked when the run started
    revision: int = UNRECORDED_REVISION  # of the environment

    def deadline_of(self, task: Mapping[str, Any]) -> float:
        """Return the seconds that one attempt at a task may take, given its wire form.

        The task's own limit is added although it replaces that of the harness: each phase has its exact limit in the
        worker, and this deadline only has to be later.
        """
        return self.deadline + float(task.get("timeout") or 0.0)

    async def pause(self, failure: Failure) -> None:
        """Before the next try. A server without workers, or gone, is waited for: that is one failure, not many."""
        await asyncio.sleep(PAUSE)
        end = time.monotonic() + self.patience
        while failure.name in AWAY and time.monotonic() < end:
            with contextlib.suppress(RamifyError):
                if (await self.client.health()).state == "ok":
                    return
            await asyncio.sleep(PAUSE)

    async def compare(self, traces: Sequence[Trace], failed: Callable[[Failure], None]) -> None:
        """The rewards that only the whole group has, asked for as often as an attempt may be made."""
        for left in reversed(range(self.tries)):
            try:
                found = await self.client.score_group(
                    traces[0].task, traces, environment_digest=self.environment, timeout=self.deadline
                )
                if (unscored := next((failure for each in found.errors for failure in each), None)) is not None:
                    raise unscored.to_exception()  # a reward that did not run: without it the group is worth nothing
            except RamifyError as error:
                failed(failure := Failure.from_exception(error))
                if not left or not failure.retryable:
                    raise
                await self.pause(failure)
                continue
            for trace, rewards in zip(traces, found.rewards, strict=True):
                trace.rewards.update(rewards)
            return


class Sampling:
    """Attempts that are out.

    `settled` is told every group that was judged, whether it can be trained on, and what each filter fired on.
    """

    def __init__(
        self,
        core: Core,
        sources: Mapping[str, Served],
        *,
        seed: int,
        limit: Callable[[], int],
        settled: Callable[[GroupRecord, list[Trace], bool, dict[str, list[bool]]], None],
        failed: Callable[[str, Failure], None],
    ) -> None:
        self._core, self.sources, self._seed = core, sources, seed
        self._limit, self._settled, self._failed = limit, settled, failed
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._since: dict[tuple[int, int], tuple[str, float]] = {}  # (source, when) of every attempt that is out
        self._settling: set[int] = set()
        self._wake = asyncio.Event()
        self.open = asyncio.Event()  # closed while the engines do not serve what the run stands at
        self.cut = asyncio.Event()  # set whenever a batch was decided

    def wake(self) -> None:
        """Something changed: there may be room for more."""
        self._wake.set()

    @property
    def out(self) -> int:
        return len(self._tasks)

    def oldest(self) -> tuple[str, str, float] | None:
        """The attempt that is out for longest: its id, its source, and the seconds."""
        if not self._since:
            return None
        key, (source, since) = min(self._since.items(), key=lambda each: each[1][1])
        return rollout_id(*key), source, time.monotonic() - since

    async def run(self) -> None:
        """Issue and dispatch, for ever."""
        async with asyncio.TaskGroup() as attempts:
            while waiting := self._core.complete():  # asked anew each time: the run may end meanwhile, and drop them
                await self._settle(waiting[0])
            while True:
                await self.open.wait()
                self._wake.clear()
                await self._core.issue()
                if await self._core.cut() or self._core.admission.finished:  # where no group follows, a short one
                    self.cut.set()
                while (taken := self._core.take(self._limit())) is not None:
                    self._send(attempts, *taken)
                await self._wake.wait()

    def _send(self, attempts: asyncio.TaskGroup, group: GroupRecord, order: Order) -> None:
        key = (order.group, order.attempt)
        task = attempts.create_task(self._attempt(group, order), name=f"attempt {rollout_id(*key)}")
        self._tasks[key], self._since[key] = task, (group.source, time.monotonic())
        task.add_done_callback(lambda task: self._back(key, task))

    def _back(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # it may be out again already
            del self._tasks[key], self._since[key]
        self.wake()

    async def _attempt(self, group: GroupRecord, order: Order) -> None:
        source = self.sources[group.source]
        core, attempt = self._core, order.attempt
        try:
            task = await source.tasks.get(group.task_number)
            if source.count is None and attempt == 0:
                core.ledger.queue_task_digest(group.source, group.task_number, compute_content_digest(task))
            ran = await source.client.run(
                task,
                id=rollout_id(group.number, attempt),
                group=str(group.number),
                attempt=attempt,
                seed=seed_of(self._seed, group.number),
                train=True,
                max_tries=1,
                environment_digest=source.environment,
                timeout=source.deadline_of(task),
            )
            traces = list(ran.episode.traces)
        except EnvironmentChanged:
            raise  # every further attempt would run in another environment
        except RamifyError as error:
            self._failed(group.source, failure := Failure.from_exception(error))
            await source.pause(failure)  # also where it is not tried again: the next group would fail as soon
            standing = await asyncio.shield(core.failed(group.number, attempt, failure))
        else:
            for error in (error for trace in traces for error in trace.errors if error.blame == "system"):
                self._failed(group.source, error)
            came = core.back(group.number, attempt, traces, self._summary(group, traces), ran.encoded_episode)
            standing = await asyncio.shield(came)
        if standing is Standing.COMPLETE and group.number not in self._settling:
            await self._settle(group.number)
        elif standing is Standing.TOO_FEW:
            self._cancel(group.number)

    async def _settle(self, number: int) -> None:
        """Let the whole group be compared where its source does that, judge it, and cut what can be cut."""
        self._settling.add(number)  # attempts that come back together find the group complete together
        try:
            await self._judge(number)
        finally:
            self._settling.discard(number)
            self.wake()

    async def _judge(self, number: int) -> None:
        group, traces = self._core.group(number), self._core.traces(number)
        source = self.sources[group.source]
        if source.compares:
            try:
                await source.compare(traces, lambda failure: self._failed(source.name, failure))
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                await self._core.drop(number, DropReason.UNSCORED, f"{error.name}: {error.message}")
                return
        episodes = {trace.attempt: [other for other in traces if other.attempt == trace.attempt] for trace in traces}
        changed = {attempt: self._summary(group, each) for attempt, each in episodes.items()}
        if (judged := await self._core.settle(number, changed if source.compares else None)) is not None:
            self._settled(group, traces, judged.member is not None, judged.fired)
        if await self._core.cut():
            self.cut.set()

    def _summary(self, group: GroupRecord, traces: Sequence[Trace]) -> dict[str, Any]:
        return {**summarize_rollout(traces), REVISION_KEY: self.sources[group.source].revision}

    def _cancel(self, number: int) -> None:
        for key in [key for key in self._tasks if key[0] == number]:
            if self._tasks[key] is not asyncio.current_task():
                self._tasks[key].cancel()


def seed_of(seed: int, number: int | str) -> int:
    """The seed of a group's attempts, which each draw from it for themselves."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest(), "big") >> 1
