"""The orchestrator without its processes: what to sample next, what to train next, and how to go on after a crash.

Whoever talks to env servers, engines and the trainer asks the core what to do and tells it what came of it. Each method
writes to the ledger first and moves the state machines then, so a process that dies between the two has lost nothing:
`open` reads the rows and stands where it stood. Methods may be called from many tasks at once: those of one group take
turns, and so do those that number groups or batches. A call that has begun should not be cancelled.

    issue -> take -> back / failed -> (complete) -> settle -> cut -> serve -> acknowledge -> commit
                                                                        applied: slots are free again
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ramify.errors import ConfigInvalid, Failure, TransitionRefused
from ramify.orchestrate.admission import Admission, Shape
from ramify.orchestrate.batch import Member, decide, regrow
from ramify.orchestrate.dispatch import Dispatch, Order
from ramify.orchestrate.groups import Fate, GroupRun, Standing
from ramify.orchestrate.judging import Judged, Rules, Source, judge, rollout_id
from ramify.orchestrate.patience import Patience
from ramify.orchestrate.sources import Mix
from ramify.store import RolloutRecord
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import BatchRecord, GroupRecord, Ledger, LedgerProgress
from ramify.trace import Forest, Trace


class Core:
    """The decisions of one run. Make it with `open`."""

    def __init__(
        self, ledger: Ledger, mix: Mix, sources: Mapping[str, Source], rules: Rules, admission: Admission
    ) -> None:
        self.ledger, self.mix, self.sources, self.rules, self.admission = ledger, mix, dict(sources), rules, admission
        self.dispatch = Dispatch()
        self.marks = LedgerProgress()
        self.patience = Patience()
        self._issued = 0
        self._groups: dict[int, GroupRecord] = {}
        self._runs: dict[int, GroupRun] = {}
        self._ready: dict[int, tuple[Member, Forest]] = {}  # scored and in no batch yet
        self._grown: dict[int, list[Forest]] = {}  # by step, of batches that were not trained yet
        self._locks: dict[int, asyncio.Lock] = {}
        self._numbering = asyncio.Lock()

    @classmethod
    async def open(
        cls, ledger: Ledger, mix: Mix, sources: Mapping[str, Source], rules: Rules, shape: Shape, last_step: int | None
    ) -> "Core":
        """A run at its beginning, or where it was left: only attempts that are missing wait to be sent out.

        Whether the trainer and the engines lived on, the caller finds out: it says so by `applied`, or starts them
        again and calls `restart_trainer`. Until then the history is all that counts as applied.
        """
        core = cls(ledger, mix, sources, rules, Admission(shape, last_step=last_step))
        check_task_counts(ledger, sources)
        for source in sources.values():
            await ledger.declare_source(source.name, source.epoch)
        mix.restore(ledger.load_states)
        core._issued = ledger.num_issued()
        core._go_back()
        for group in ledger.open_groups():
            await core._resume(group)
        return core

    # -- sampling ------------------------------------------------------------------------------------------------

    async def issue(self) -> list[GroupRecord]:
        """Issue as many groups as there is room for."""
        found: list[GroupRecord] = []
        async with self._numbering:
            while self.admission.room:
                chosen = self.mix.next()
                if chosen is None:
                    self.admission.exhausted = True
                    break
                size = self.sources[chosen.source].size
                version = (self.marks.incarnation, self.admission.applied)
                group = GroupRecord(self._issued, chosen.source, chosen.task, size, chosen.epoch, *version)
                await self.ledger.issue_group(group, chosen.states)
                self._issued += 1
                self.admission.issue(group.number)
                self._begin(group)
                for attempt in range(size):
                    self.dispatch.add(group.number, attempt)
                found.append(group)
        return found

    def take(self, limit: int) -> tuple[GroupRecord, Order] | None:
        """The next attempt to send out, unless `limit` are out or the trainer has to catch up first."""
        order = self.dispatch.take(limit, self.admission.may_dispatch)
        return None if order is None else (self._groups[order.group], order)

    async def back(
        self,
        number: int,
        attempt: int,
        traces: Sequence[Trace],
        summary: dict[str, Any] | None = None,
        encoded: bytes | memoryview | None = None,
    ) -> Standing:
        """An attempt came back with its episode. A COMPLETE group is to be settled, one of TOO_FEW was dropped.

        Where the episode is at hand as it came over the wire, `encoded`, it is kept so.
        """
        self.dispatch.back(number, attempt)
        async with self._alone(number) as run:
            if run is None:
                return Standing.TOO_FEW  # dropped meanwhile
            fate = run.back(attempt, traces)
            if fate is Fate.KEPT:
                row = self._row(number, attempt, traces, summary)
                await self.ledger.record_sampled(number, attempt, row, traces if encoded is None else encoded)
                return run.standing
            failures = (error for trace in traces for error in trace.errors if error.blame == "system")
            return await self._unlucky(run, attempt, fate, _told(next(failures, None)))

    async def failed(self, number: int, attempt: int, failure: Failure) -> Standing:
        """An attempt came back with nothing but a failure."""
        self.dispatch.back(number, attempt)
        async with self._alone(number) as run:
            if run is None:
                return Standing.TOO_FEW
            return await self._unlucky(run, attempt, run.failed(attempt, failure), _told(failure))

    def group(self, number: int) -> GroupRecord:
        """A group that is not in a batch yet."""
        return self._groups[number]

    def traces(self, number: int) -> list[Trace]:
        """The traces of a group that is not in a batch yet, to be compared by the rewards of its source."""
        return self._runs[number].traces

    def complete(self) -> list[int]:
        """Groups that wait to be settled: in a run that goes on, those whose process died before it did so."""
        return [
            number
            for number, run in self._runs.items()
            if number not in self._ready and run.standing is Standing.COMPLETE
        ]

    async def settle(self, number: int, summaries: Mapping[int, dict[str, Any]] | None = None) -> Judged | None:
        """Judge a complete group whose rewards are all there; None if it was judged already, or dropped meanwhile.

        `summaries` are those of the attempts whose traces the rewards of the group have changed.
        """
        async with self._alone(number) as run:
            if run is None or number in self._ready:
                return None
            group = self._groups[number]
            found = judge(run, self.sources[group.source], self.rules)
            states = {} if found.reward is None else self.mix.learn(group.source, group.task_number, found.reward)
            if found.member is None or found.forest is None:
                assert found.reason is not None
                await self.ledger.drop_group(number, found.reason, found.detail, states=states)
                self._forget(number, found.reason)
                return found
            changed = [
                (self._row(number, attempt, run.rollouts[attempt], summary), run.rollouts[attempt])
                for attempt, summary in (summaries or {}).items()
            ]
            await self.ledger.record_scored(number, found.notes, rollouts=changed, states=states)
            self.admission.score(number)
            self.patience.record_trainable()
            self._ready[number] = (found.member, found.forest)
            return found

    async def drop(self, number: int, reason: DropReason, detail: str = "") -> None:
        """Give a group up. Attempts of it that are out count no more and should be cancelled."""
        async with self._numbering, self._alone(number) as run:  # not while a batch with it is cut
            if run is not None:
                await self.ledger.drop_group(number, reason, detail)
                self._forget(number, reason)

    # -- training ------------------------------------------------------------------------------------------------

    async def cut(self) -> list[BatchRecord]:
        """Decide every batch that can be decided now."""
        found: list[BatchRecord] = []
        async with self._numbering:
            while numbers := self.admission.ready():
                members = [self._ready[number] for number in numbers]
                batch = decide(self.admission.step, members, self.rules.seq_len)
                await self.ledger.record_batch(batch)
                self._grown[batch.step] = [forest for _, forest in members]
                self.admission.cut(numbers)
                for number in numbers:
                    del self._ready[number], self._runs[number], self._groups[number], self._locks[number]
                found.append(batch)
        return found

    async def serve(self, step: int) -> BatchRecord | None:
        """The batch of a step for the trainer; None while it was not cut."""
        found = self.ledger.get_batch(step)
        if found is not None:
            await self.ledger.record_served(step)
        return found

    def forests(self, batch: BatchRecord) -> list[Forest]:
        """What grew of the groups of a batch; it grows again where an earlier process cut it, or it was trained."""
        return self._grown.get(batch.step) or regrow(batch, self.ledger.store.read_traces)

    async def acknowledge(self, step: int) -> None:
        """The trainer has done a step."""
        await self.ledger.acknowledge_step(step)
        self._grown.pop(step, None)
        self.marks = self.ledger.progress()

    def applied(self, incarnation: int, version: int) -> None:
        """The engines sample from this version now; one of an earlier incarnation frees nothing."""
        if incarnation == self.marks.incarnation:
            self.admission.apply(version)

    async def commit(self, version: int) -> None:
        """The trainer's checkpoint of this version is safe."""
        await self.ledger.commit_version(version)
        self.marks = self.ledger.progress()

    async def restart_trainer(self) -> LedgerProgress:
        """A trainer begins at `committed`: it is served the batches after that again, the same in the same order."""
        async with self._numbering:
            await self.ledger.begin_incarnation()
            self._go_back()
        return self.marks

    async def finish(self) -> None:
        """The last step is done: what was issued beside it is dropped by that name."""
        if not self.admission.finished:
            raise TransitionRefused(f"the run cannot end: batch {self.admission.step} is still to be cut")
        for group in self.ledger.open_groups():
            await self.drop(group.number, DropReason.RUN_ENDED)

    # -- inside --------------------------------------------------------------------------------------------------

    def _go_back(self) -> None:
        self.marks = self.ledger.progress()
        again = {batch.step: batch.group_numbers for batch in self.ledger.batches(self.marks.committed)}
        self.admission.go_back(self.marks.committed, again)

    @asynccontextmanager
    async def _alone(self, number: int) -> AsyncIterator[GroupRun | None]:
        """The group, with nobody else at it; None if it is in a batch or was dropped."""
        lock = self._locks.get(number)
        if lock is None:
            yield None
            return
        async with lock:
            yield self._runs.get(number)

    def _begin(self, group: GroupRecord) -> GroupRun:
        source = self.sources[group.source]
        run = GroupRun(
            group.number,
            group.size,
            tries=source.tries,
            min_group=self.rules.min_group,
            group_rewards=source.group_rewards,
        )
        self._groups[group.number], self._runs[group.number] = group, run
        self._locks[group.number] = asyncio.Lock()
        return run

    async def _resume(self, group: GroupRecord) -> None:
        """A group that an earlier process issued."""
        if group.source not in self.sources:
            await self.ledger.drop_group(
                group.number, DropReason.CANCELLED, f"the run has no source {group.source!r} any more"
            )
            return
        run = self._begin(group)
        attempts = self.ledger.attempts(group.number)
        run.restore(
            {
                each.attempt_index: self.ledger.store.read_traces(each.rollout_id)
                for each in attempts
                if each.rollout_id is not None and each.state is not GroupState.DROPPED
            },
            {each.attempt_index: _untold(each.detail) for each in attempts if each.state is GroupState.DROPPED},
            {each.attempt_index: each.num_tries for each in attempts},
        )
        self.admission.resume(group.number)
        for attempt in run.missing:
            self.dispatch.add(group.number, attempt, again=1)
        if group.state is GroupState.SCORED:
            found = judge(run, self.sources[group.source], self.rules)
            if found.member is None or found.forest is None:  # other filters or another algorithm than before
                await self.drop(group.number, found.reason or DropReason.CANCELLED, found.detail)
                return
            self.admission.score(group.number)
            self._ready[group.number] = (found.member, found.forest)
        elif run.standing is Standing.TOO_FEW:
            await self.drop(group.number, DropReason.TOO_FEW, _why(run))

    async def _unlucky(self, run: GroupRun, attempt: int, fate: Fate, told: str) -> Standing:
        if fate is Fate.AGAIN:
            await self.ledger.retry_attempt(run.number, attempt, told)
            self.dispatch.add(run.number, attempt, again=run.runs(attempt) - 1)
            return Standing.OPEN
        await self.ledger.drop_attempt(run.number, attempt, DropReason.FAILED, told)
        if run.standing is Standing.TOO_FEW:
            await self.ledger.drop_group(run.number, DropReason.TOO_FEW, _why(run))
            self._forget(run.number, DropReason.TOO_FEW)
        return run.standing

    def _forget(self, number: int, reason: DropReason) -> None:
        self.patience.record_dropped(reason)
        self.admission.drop(number)
        self.dispatch.forget(number)
        self._ready.pop(number, None)
        del self._runs[number], self._groups[number], self._locks[number]

    def _row(self, number: int, attempt: int, traces: Sequence[Trace], summary: dict[str, Any] | None) -> RolloutRecord:
        group = self._groups[number]
        task, reward = str(group.task_number), traces[0].reward if traces else None
        return RolloutRecord(rollout_id(number, attempt), task, attempt, group.source, reward, summary=summary or {})


def check_task_counts(ledger: Ledger, sources: Mapping[str, Source]) -> None:
    """Raise ConfigInvalid if a source that is sampled in epochs has another number of tasks than before."""
    known = ledger.sources()
    for source in sources.values():
        before = known.get(source.name)
        if before is not None and source.epoch is not None and source.epoch != before:
            raise ConfigInvalid(
                f"train source {source.name}: its taskset has {source.epoch} tasks, and had {before} when the run was "
                f"started last; bring them back, or begin anew with another --name or --fresh"
            )


def _told(failure: Failure | None) -> str:
    return "a reward was due and did not run" if failure is None else f"{failure.name}: {failure.message}"


def _untold(detail: str) -> Failure:
    name, _, message = detail.partition(": ")
    return Failure(name, message, "system", False)


def _why(run: GroupRun) -> str:
    names = sorted({failure.name for failure in run.lost.values()})
    return f"{len(run.lost)} of {run.size} attempts failed: {', '.join(names)}"
