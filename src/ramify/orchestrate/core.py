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
from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits
from ramify.orchestrate.attempt_queue import AttemptQueue, QueuedAttempt
from ramify.orchestrate.batches import BatchGroup, encode_batch, rebuild_forests
from ramify.orchestrate.group_tracker import AttemptOutcome, GroupProgress, GroupTracker
from ramify.orchestrate.patience import PatienceCounter
from ramify.orchestrate.scoring import ScoredGroup, ScoringRules, SourceSpec, build_rollout_id, score_complete_group
from ramify.orchestrate.source_mix import SourceMix
from ramify.store import RolloutRecord
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import BatchRecord, GroupRecord, Ledger, LedgerProgress
from ramify.trace import Forest, Trace


class OrchestratorCore:
    """The decisions of one run. Make it with `open`."""

    def __init__(
        self,
        ledger: Ledger,
        source_mix: SourceMix,
        sources: Mapping[str, SourceSpec],
        scoring_rules: ScoringRules,
        admission: AdmissionControl,
    ) -> None:
        self.ledger, self.source_mix, self.sources, self.scoring_rules, self.admission = (
            ledger,
            source_mix,
            dict(sources),
            scoring_rules,
            admission,
        )
        self.attempt_queue = AttemptQueue()
        self.ledger_progress = LedgerProgress()
        self.patience = PatienceCounter()
        self._next_group_number = 0
        self._groups: dict[int, GroupRecord] = {}
        self._trackers: dict[int, GroupTracker] = {}
        self._scored_groups: dict[int, tuple[BatchGroup, Forest]] = {}  # scored and in no batch yet
        self._forests_by_step: dict[int, list[Forest]] = {}  # by step, of batches that were not trained yet
        self._group_locks: dict[int, asyncio.Lock] = {}
        self._numbering_lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        ledger: Ledger,
        source_mix: SourceMix,
        sources: Mapping[str, SourceSpec],
        scoring_rules: ScoringRules,
        limits: AdmissionLimits,
        max_steps: int | None,
    ) -> "OrchestratorCore":
        """A run at its beginning, or where it was left: only attempts that are missing wait to be sent out.

        Whether the trainer and the engines lived on, the caller finds out: it says so by `applied`, or starts them
        again and calls `restart_trainer`. Until then the history is all that counts as applied.
        """
        core = cls(ledger, source_mix, sources, scoring_rules, AdmissionControl(limits, max_steps=max_steps))
        check_task_counts(ledger, sources)
        for source in sources.values():
            await ledger.declare_source(source.name, source.tasks_per_epoch)
        source_mix.restore(ledger.load_states)
        core._next_group_number = ledger.num_issued()
        core._rewind_to_committed()
        for group in ledger.open_groups():
            await core._restore_group(group)
        return core

    # -- sampling ------------------------------------------------------------------------------------------------

    async def issue_groups(self) -> list[GroupRecord]:
        """Issue as many groups as there is room for."""
        found: list[GroupRecord] = []
        async with self._numbering_lock:
            while self.admission.num_free_slots:
                chosen = self.source_mix.next_task()
                if chosen is None:
                    self.admission.exhausted = True
                    break
                size = self.sources[chosen.source].group_size
                version = (self.ledger_progress.incarnation, self.admission.applied_version)
                group = GroupRecord(self._next_group_number, chosen.source, chosen.task, size, chosen.epoch, *version)
                await self.ledger.issue_group(group, chosen.state_updates)
                self._next_group_number += 1
                self.admission.issue_group(group.number)
                self._track_group(group)
                for attempt in range(size):
                    self.attempt_queue.push(group.number, attempt)
                found.append(group)
        return found

    def next_attempt(self, limit: int) -> tuple[GroupRecord, QueuedAttempt] | None:
        """The next attempt to send out, unless `limit` are out or the trainer has to catch up first."""
        order = self.attempt_queue.pop(limit, self.admission.can_dispatch)
        return None if order is None else (self._groups[order.group], order)

    async def record_attempt(
        self,
        group_number: int,
        attempt: int,
        traces: Sequence[Trace],
        summary: dict[str, Any] | None = None,
        encoded_episode: bytes | memoryview | None = None,
    ) -> GroupProgress:
        """An attempt came back with its episode. A COMPLETE group is to be settled, one of TOO_FEW was dropped.

        Where the episode is at hand as it came over the wire, `encoded`, it is kept so.
        """
        self.attempt_queue.mark_done(group_number, attempt)
        async with self._lock_group(group_number) as run:
            if run is None:
                return GroupProgress.TOO_FEW  # dropped meanwhile
            fate = run.record_episode(attempt, traces)
            if fate is AttemptOutcome.KEPT:
                row = self._build_record(group_number, attempt, traces, summary)
                await self.ledger.record_sampled(
                    group_number, attempt, row, traces if encoded_episode is None else encoded_episode
                )
                return run.progress
            failures = (error for trace in traces for error in trace.errors if error.blame == "system")
            return await self._retry_or_drop(run, attempt, fate, format_failure(next(failures, None)))

    async def record_failure(self, group_number: int, attempt: int, failure: Failure) -> GroupProgress:
        """An attempt came back with nothing but a failure."""
        self.attempt_queue.mark_done(group_number, attempt)
        async with self._lock_group(group_number) as run:
            if run is None:
                return GroupProgress.TOO_FEW
            return await self._retry_or_drop(
                run, attempt, run.record_failure(attempt, failure), format_failure(failure)
            )

    def get_group(self, group_number: int) -> GroupRecord:
        """A group that is not in a batch yet."""
        return self._groups[group_number]

    def get_traces(self, group_number: int) -> list[Trace]:
        """The traces of a group that is not in a batch yet, to be compared by the rewards of its source."""
        return self._trackers[group_number].traces

    def get_groups_to_score(self) -> list[int]:
        """Groups that wait to be settled: in a run that goes on, those whose process died before it did so."""
        return [
            number
            for number, run in self._trackers.items()
            if number not in self._scored_groups and run.progress is GroupProgress.COMPLETE
        ]

    async def score_group(
        self, group_number: int, summaries: Mapping[int, dict[str, Any]] | None = None
    ) -> ScoredGroup | None:
        """Judge a complete group whose rewards are all there; None if it was judged already, or dropped meanwhile.

        `summaries` are those of the attempts whose traces the rewards of the group have changed.
        """
        async with self._lock_group(group_number) as run:
            if run is None or group_number in self._scored_groups:
                return None
            group = self._groups[group_number]
            found = score_complete_group(run, self.sources[group.source], self.scoring_rules)
            states = (
                {}
                if found.mean_reward is None
                else self.source_mix.record_reward(group.source, group.task_number, found.mean_reward)
            )
            if found.batch_group is None or found.forest is None:
                assert found.drop_reason is not None
                await self.ledger.drop_group(group_number, found.drop_reason, found.drop_detail, states=states)
                self._untrack_group(group_number, found.drop_reason)
                return found
            changed = [
                (self._build_record(group_number, attempt, run.rollouts[attempt], summary), run.rollouts[attempt])
                for attempt, summary in (summaries or {}).items()
            ]
            await self.ledger.record_scored(group_number, found.attempt_notes, rollouts=changed, states=states)
            self.admission.mark_scored(group_number)
            self.patience.record_trainable()
            self._scored_groups[group_number] = (found.batch_group, found.forest)
            return found

    async def drop_group(self, group_number: int, reason: DropReason, detail: str = "") -> None:
        """Give a group up. Attempts of it that are out count no more and should be cancelled."""
        async with self._numbering_lock, self._lock_group(group_number) as run:  # not while a batch with it is cut
            if run is not None:
                await self.ledger.drop_group(group_number, reason, detail)
                self._untrack_group(group_number, reason)

    # -- training ------------------------------------------------------------------------------------------------

    async def form_batches(self) -> list[BatchRecord]:
        """Decide every batch that can be decided now."""
        found: list[BatchRecord] = []
        async with self._numbering_lock:
            while numbers := self.admission.next_batch():
                members = [self._scored_groups[number] for number in numbers]
                batch = encode_batch(self.admission.next_step, members, self.scoring_rules.seq_len)
                await self.ledger.record_batch(batch)
                self._forests_by_step[batch.step] = [forest for _, forest in members]
                self.admission.record_batch(numbers)
                for number in numbers:
                    del (
                        self._scored_groups[number],
                        self._trackers[number],
                        self._groups[number],
                        self._group_locks[number],
                    )
                found.append(batch)
        return found

    async def serve_batch(self, step: int) -> BatchRecord | None:
        """The batch of a step for the trainer; None while it was not cut."""
        found = self.ledger.get_batch(step)
        if found is not None:
            await self.ledger.record_served(step)
        return found

    def get_forests(self, batch: BatchRecord) -> list[Forest]:
        """What grew of the groups of a batch; it grows again where an earlier process cut it, or it was trained."""
        return self._forests_by_step.get(batch.step) or rebuild_forests(batch, self.ledger.store.read_traces)

    async def acknowledge_step(self, step: int) -> None:
        """The trainer has done a step."""
        await self.ledger.acknowledge_step(step)
        self._forests_by_step.pop(step, None)
        self.ledger_progress = self.ledger.progress()

    def record_applied_version(self, incarnation: int, version: int) -> None:
        """The engines sample from this version now; one of an earlier incarnation frees nothing."""
        if incarnation == self.ledger_progress.incarnation:
            self.admission.apply_version(version)

    async def commit_version(self, version: int) -> None:
        """The trainer's checkpoint of this version is safe."""
        await self.ledger.commit_version(version)
        self.ledger_progress = self.ledger.progress()

    async def restart_trainer(self) -> LedgerProgress:
        """A trainer begins at `committed`: it is served the batches after that again, the same in the same order."""
        async with self._numbering_lock:
            await self.ledger.begin_incarnation()
            self._rewind_to_committed()
        return self.ledger_progress

    async def drop_open_groups(self) -> None:
        """The last step is done: what was issued beside it is dropped by that name."""
        if not self.admission.is_finished:
            raise TransitionRefused(f"the run cannot end: batch {self.admission.next_step} is still to be cut")
        for group in self.ledger.open_groups():
            await self.drop_group(group.number, DropReason.RUN_ENDED)

    # -- inside --------------------------------------------------------------------------------------------------

    def _rewind_to_committed(self) -> None:
        self.ledger_progress = self.ledger.progress()
        again = {batch.step: batch.group_numbers for batch in self.ledger.batches(self.ledger_progress.committed)}
        self.admission.rewind(self.ledger_progress.committed, again)

    @asynccontextmanager
    async def _lock_group(self, group_number: int) -> AsyncIterator[GroupTracker | None]:
        """The group, with nobody else at it; None if it is in a batch or was dropped."""
        lock = self._group_locks.get(group_number)
        if lock is None:
            yield None
            return
        async with lock:
            yield self._trackers.get(group_number)

    def _track_group(self, group: GroupRecord) -> GroupTracker:
        source = self.sources[group.source]
        run = GroupTracker(
            group.number,
            group.size,
            max_tries=source.max_tries,
            min_group=self.scoring_rules.min_group,
            group_rewards=source.group_rewards,
        )
        self._groups[group.number], self._trackers[group.number] = group, run
        self._group_locks[group.number] = asyncio.Lock()
        return run

    async def _restore_group(self, group: GroupRecord) -> None:
        """A group that an earlier process issued."""
        if group.source not in self.sources:
            await self.ledger.drop_group(
                group.number, DropReason.CANCELLED, f"the run has no source {group.source!r} any more"
            )
            return
        run = self._track_group(group)
        attempts = self.ledger.attempts(group.number)
        run.restore(
            {
                each.attempt_index: self.ledger.store.read_traces(each.rollout_id)
                for each in attempts
                if each.rollout_id is not None and each.state is not GroupState.DROPPED
            },
            {each.attempt_index: parse_failure(each.detail) for each in attempts if each.state is GroupState.DROPPED},
            {each.attempt_index: each.num_tries for each in attempts},
        )
        self.admission.restore_group(group.number)
        for attempt in run.pending_attempts:
            self.attempt_queue.push(group.number, attempt, num_retries=1)
        if group.state is GroupState.SCORED:
            found = score_complete_group(run, self.sources[group.source], self.scoring_rules)
            if found.batch_group is None or found.forest is None:  # other filters or another algorithm than before
                await self.drop_group(group.number, found.drop_reason or DropReason.CANCELLED, found.drop_detail)
                return
            self.admission.mark_scored(group.number)
            self._scored_groups[group.number] = (found.batch_group, found.forest)
        elif run.progress is GroupProgress.TOO_FEW:
            await self.drop_group(group.number, DropReason.TOO_FEW, _describe_failures(run))

    async def _retry_or_drop(
        self, tracker: GroupTracker, attempt: int, outcome: AttemptOutcome, message: str
    ) -> GroupProgress:
        if outcome is AttemptOutcome.RETRY:
            await self.ledger.retry_attempt(tracker.number, attempt, message)
            self.attempt_queue.push(tracker.number, attempt, num_retries=tracker.get_num_tries(attempt) - 1)
            return GroupProgress.OPEN
        await self.ledger.drop_attempt(tracker.number, attempt, DropReason.FAILED, message)
        if tracker.progress is GroupProgress.TOO_FEW:
            await self.ledger.drop_group(tracker.number, DropReason.TOO_FEW, _describe_failures(tracker))
            self._untrack_group(tracker.number, DropReason.TOO_FEW)
        return tracker.progress

    def _untrack_group(self, group_number: int, reason: DropReason) -> None:
        self.patience.record_dropped(reason)
        self.admission.drop_group(group_number)
        self.attempt_queue.remove_group(group_number)
        self._scored_groups.pop(group_number, None)
        del self._trackers[group_number], self._groups[group_number], self._group_locks[group_number]

    def _build_record(
        self, group_number: int, attempt: int, traces: Sequence[Trace], summary: dict[str, Any] | None
    ) -> RolloutRecord:
        group = self._groups[group_number]
        task, reward = str(group.task_number), traces[0].reward if traces else None
        return RolloutRecord(
            build_rollout_id(group_number, attempt), task, attempt, group.source, reward, summary=summary or {}
        )


def check_task_counts(ledger: Ledger, sources: Mapping[str, SourceSpec]) -> None:
    """Raise ConfigInvalid if a source that is sampled in epochs has another number of tasks than before."""
    known = ledger.sources()
    for source in sources.values():
        before = known.get(source.name)
        if before is not None and source.tasks_per_epoch is not None and source.tasks_per_epoch != before:
            raise ConfigInvalid(
                f"train source {source.name}: its taskset has {source.tasks_per_epoch} tasks, and had "
                f"{before} when the run was "
                f"started last; bring them back, or begin anew with another --name or --fresh"
            )


def format_failure(failure: Failure | None) -> str:
    return "a reward was due and did not run" if failure is None else f"{failure.name}: {failure.message}"


def parse_failure(detail: str) -> Failure:
    name, _, message = detail.partition(": ")
    return Failure(name, message, "system", False)


def _describe_failures(tracker: GroupTracker) -> str:
    names = sorted({failure.name for failure in tracker.failed_attempts.values()})
    return f"{len(tracker.failed_attempts)} of {tracker.size} attempts failed: {', '.join(names)}"
