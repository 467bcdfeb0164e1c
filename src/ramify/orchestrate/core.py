"""The decisions of the orchestrator, without I/O: what to sample next, what to train next, how to resume after a crash.

The I/O layers (env servers, engines, trainer) ask the core for the next action and report the result. Each method
writes to the ledger before it moves the state machines, so a crash between the two loses nothing: `open` restores the
state from the ledger. Methods may be called from many tasks concurrently: calls for one group take turns, and so do
calls that assign numbers to groups or batches. A call that has started should not be cancelled.

    issue_groups -> next_attempt -> record_attempt / record_failure -> score_group
        -> form_batches -> serve_batch -> acknowledge_step -> commit_version
    record_applied_version frees the slots of the batches that were trained
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ramify.core.errors import ConfigInvalid, Failure, OperationInvalid
from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits
from ramify.orchestrate.batches import (
    BatchGroup,
    encode_batch,
    normalize_groups,
    read_top_logprobs,
    rebuild_forests,
    remove_top_logprobs,
    write_top_logprobs,
)
from ramify.orchestrate.curriculum import SourceMix
from ramify.orchestrate.group_scoring import (
    ScoredGroup,
    ScoringRules,
    SourceSpec,
    build_rollout_id,
    score_complete_group,
)
from ramify.orchestrate.group_tracker import (
    MISSING_REWARD,
    AttemptOutcome,
    AttemptQueue,
    GroupProgress,
    GroupTracker,
    QueuedAttempt,
    list_system_failures,
)
from ramify.orchestrate.reference_scores import NodeScores, decode_scores, encode_scores, uses_top_logprobs
from ramify.orchestrate.untrainable_groups import UntrainableGroupCounter
from ramify.run.store import RolloutRecord
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.ledger import BatchRecord, CommitRecord, GroupRecord, Ledger, LedgerProgress
from ramify.run.store.ledger_tables import TrainerRegistration
from ramify.trace import Forest, Trace

MAX_ISSUED_AT_ONCE = 256  # groups in one transaction of the ledger
ALGORITHM_STATE_PREFIX = "algorithm/"  # of the ledger keys for the state of each source's algorithm


class OrchestratorCore:
    """The decisions of one run. Create it with `open`.

    `ledger_progress` is how far training is, as the ledger has it; `untrainable_groups` counts groups without a
    training signal.
    """

    def __init__(
        self,
        ledger: Ledger,
        source_mix: SourceMix,
        sources: Mapping[str, SourceSpec],
        scoring_rules: ScoringRules,
        admission: AdmissionControl,
    ) -> None:
        self.ledger, self.source_mix, self.sources = ledger, source_mix, dict(sources)
        self.scoring_rules, self.admission = scoring_rules, admission
        self.attempt_queue = AttemptQueue()
        self.ledger_progress = LedgerProgress()
        self.untrainable_groups = UntrainableGroupCounter()
        self._algorithm_states: dict[str, dict[str, Any]] = {}  # by source
        self._next_group_number = 0
        self._groups: dict[int, GroupRecord] = {}
        self._trackers: dict[int, GroupTracker] = {}
        self._scored_groups: dict[int, tuple[BatchGroup, Forest]] = {}  # not in a batch yet
        self._forests_by_step: dict[int, list[Forest]] = {}  # of batches that are not trained yet
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
        max_steps: int,
    ) -> "OrchestratorCore":
        """Start a run, or restore it from the ledger; only attempts without a result are queued.

        The caller must then call `record_applied_version` if trainer and engines are still alive, or `register_trainer`
        if they are not. Until it does, the committed version counts as applied.
        """
        core = cls(ledger, source_mix, sources, scoring_rules, AdmissionControl(limits, max_steps))
        check_task_counts(ledger, sources)
        for source in sources.values():
            await ledger.declare_source(source.name, source.tasks_per_epoch)
        source_mix.restore(ledger.load_states)
        core._algorithm_states = ledger.load_states(ALGORITHM_STATE_PREFIX)
        core._next_group_number = ledger.num_issued()
        core._rewind_to_committed()
        for group in ledger.open_groups():
            await core._restore_group(group)
        return core

    # -- sampling ------------------------------------------------------------------------------------------------

    async def issue_groups(self) -> list[GroupRecord]:
        """Issue a group for every free slot, and return the new groups."""
        all_groups: list[GroupRecord] = []
        async with self._numbering_lock:
            while num_groups := min(self.admission.num_free_slots, MAX_ISSUED_AT_ONCE):
                groups, states = self._choose_groups(num_groups)
                if groups:
                    await self.ledger.issue_groups(groups, states)
                self._next_group_number += len(groups)
                for group in groups:
                    self.admission.issue_group(group.number)
                    self._track_group(group)
                    for attempt in range(group.size):
                        self.attempt_queue.push(group.number, attempt)
                all_groups += groups
                self.admission.exhausted = len(groups) < num_groups
        return all_groups

    def _choose_groups(self, num_groups: int) -> tuple[list[GroupRecord], dict[str, Any]]:
        """Return the next groups, fewer if the sources are exhausted, and the states that choosing them changed."""
        groups, states = list[GroupRecord](), dict[str, Any]()
        version = (self.ledger_progress.incarnation, self.admission.applied_version)
        for number in range(self._next_group_number, self._next_group_number + num_groups):
            choice = self.source_mix.next_task()
            if choice is None:
                break
            size = self.sources[choice.source].group_size
            groups.append(GroupRecord(number, choice.source, choice.task, size, choice.epoch, *version))
            states |= choice.state_updates
        return groups, states

    def next_attempt(self, limit: int) -> tuple[GroupRecord, QueuedAttempt] | None:
        """Return the next attempt to dispatch; None if `limit` are in flight or the trainer has to catch up first."""
        while (queued := self.attempt_queue.pop(limit, self.admission.can_dispatch)) is not None:
            tracker = self._trackers.get(queued.group)
            if tracker is not None and tracker.is_pending(queued.attempt):
                return self._groups[queued.group], queued
            self.attempt_queue.mark_done(*queued)  # a result of its earlier try has arrived meanwhile
        return None

    async def record_attempt(
        self,
        group_number: int,
        attempt: int,
        traces: Sequence[Trace],
        summary: dict[str, Any] | None = None,
        encoded_episode: bytes | memoryview | None = None,
    ) -> GroupProgress:
        """Record the episode of an attempt, and return the progress of its group.

        If the group is COMPLETE, the caller must score it; if it has TOO_FEW attempts, it was dropped. Only the first
        result of an attempt counts: one that timed out and was run again may return twice. `encoded_episode`, if given,
        is stored without encoding the traces again, unless they hold images.
        """
        self.attempt_queue.mark_done(group_number, attempt)
        async with self._lock_group(group_number) as tracker:
            if tracker is None:
                return GroupProgress.TOO_FEW  # dropped meanwhile
            if not tracker.is_pending(attempt):
                return tracker.progress
            outcome = tracker.record_episode(attempt, traces)
            if outcome is AttemptOutcome.KEPT:
                record = self._build_record(group_number, attempt, traces, summary)
                has_images = any(media.data for trace in traces for media in trace.graph.media)
                episode = traces if encoded_episode is None or has_images else encoded_episode
                await self.ledger.record_sampled(group_number, attempt, record, episode)
                return tracker.progress
            failure = next(iter(list_system_failures(traces)), MISSING_REWARD)
            return await self._retry_or_drop(tracker, attempt, outcome, failure)

    async def record_failure(self, group_number: int, attempt: int, failure: Failure) -> GroupProgress:
        """Record an attempt that failed without an episode, and return the progress of its group."""
        self.attempt_queue.mark_done(group_number, attempt)
        async with self._lock_group(group_number) as tracker:
            if tracker is None:
                return GroupProgress.TOO_FEW
            if not tracker.is_pending(attempt):
                return tracker.progress
            outcome = tracker.record_failure(attempt, failure)
            return await self._retry_or_drop(tracker, attempt, outcome, failure)

    def get_group(self, group_number: int) -> GroupRecord:
        """Return a group that is not in a batch yet."""
        return self._groups[group_number]

    def get_traces(self, group_number: int) -> list[Trace]:
        """Return the traces of a group that is not in a batch yet."""
        return self._trackers[group_number].traces

    def get_groups_to_score(self) -> list[int]:
        """Return complete groups without a score; after a restart, those that the old process did not score."""
        return [
            number
            for number, tracker in self._trackers.items()
            if number not in self._scored_groups and tracker.progress is GroupProgress.COMPLETE
        ]

    async def score_group(
        self,
        group_number: int,
        summaries: Mapping[int, dict[str, Any]] | None = None,
        reference_scores: NodeScores | None = None,
    ) -> ScoredGroup | None:
        """Score a complete group; None if it was scored or dropped meanwhile.

        `summaries` holds, by attempt, the new summary of each rollout that the group rewards changed.
        `reference_scores` are stored with the group, so that a restart does not compute them again.
        """
        async with self._lock_group(group_number) as tracker:
            if tracker is None or group_number in self._scored_groups:
                return None
            await self._write_top_logprobs(group_number, reference_scores)
            group, states = self._groups[group_number], dict[str, Any]()
            state_before = self._algorithm_states.get(group.source, {})
            scored = score_complete_group(
                tracker, self.sources[group.source], self.scoring_rules, reference_scores, state_before
            )
            if scored.mean_reward is not None:
                states = self.source_mix.record_reward(group.source, group.task_number, scored.mean_reward)
                if scored.state_after is not None:
                    self._algorithm_states[group.source] = scored.state_after
                    states[f"{ALGORITHM_STATE_PREFIX}{group.source}"] = scored.state_after
            if scored.batch_group is None or scored.forest is None:
                assert scored.drop_reason is not None
                await self._drop_locked_group(group_number, scored.drop_reason, scored.drop_detail, states)
                return scored
            changed: list[tuple[RolloutRecord, Sequence[Trace]]] = []
            for attempt, summary in (summaries or {}).items():
                traces = tracker.rollouts[attempt]
                changed.append((self._build_record(group_number, attempt, traces, summary), traces))
            await self.ledger.record_scored(
                group_number,
                scored.attempt_notes,
                rollouts=changed,
                states=states,
                reference_scores=encode_scores(reference_scores) if reference_scores else None,
                algorithm_state_before=state_before if scored.state_after is not None else None,
            )
            self.admission.mark_scored(group_number)
            self.untrainable_groups.record_trainable()
            self._scored_groups[group_number] = (scored.batch_group, scored.forest)
            return scored

    async def drop_group(self, group_number: int, reason: DropReason, detail: str = "") -> None:
        """Drop a group. Its attempts in flight are ignored and should be cancelled."""
        # The numbering lock waits for a batch with the group that is being formed.
        async with self._numbering_lock, self._lock_group(group_number) as tracker:
            if tracker is not None:
                await self._drop_locked_group(group_number, reason, detail)

    # -- training ------------------------------------------------------------------------------------------------

    async def form_batches(self) -> list[BatchRecord]:
        """Form every batch that can be formed now, and return them."""
        batches: list[BatchRecord] = []
        async with self._numbering_lock:
            while numbers := self.admission.next_batch():
                scored_groups = [self._scored_groups[number] for number in numbers]
                batch = encode_batch(self.admission.next_step, scored_groups, self.scoring_rules.seq_len)
                await self.ledger.record_batch(batch)
                self._forests_by_step[batch.step] = normalize_groups(*zip(*scored_groups))
                self.admission.record_batch(numbers)
                for number in numbers:
                    self._untrack_group(number)
                batches.append(batch)
        return batches

    async def serve_batch(self, step: int, incarnation: int) -> BatchRecord | None:
        """Return the batch of a step for a trainer and record that it was served; None if it is not formed yet.

        This, `acknowledge_step` and `commit_version` raise ProcessReplaced for a trainer that was replaced.
        """
        batch = self.ledger.get_batch(step)
        if batch is not None:
            await self.ledger.record_served(step, incarnation=incarnation)
        return batch

    def get_forests(self, batch: BatchRecord) -> list[Forest]:
        """Return the forests of a batch, from memory or rebuilt from the stored traces."""
        return self._forests_by_step.get(batch.step) or rebuild_forests(
            batch, self.ledger.store.read_traces, lambda number: read_top_logprobs(self.ledger.store.path, number)
        )

    async def acknowledge_step(self, step: int, incarnation: int) -> None:
        """Record that the trainer has finished a step."""
        await self.ledger.acknowledge_step(step, incarnation=incarnation)
        self._forests_by_step.pop(step, None)
        self.ledger_progress = self.ledger.progress()

    def record_applied_version(self, incarnation: int, version: int) -> None:
        """Record that the engines sample from this version; a version of an earlier incarnation is ignored."""
        if incarnation == self.ledger_progress.incarnation:
            self.admission.apply_version(version)

    async def commit_version(self, commit: CommitRecord) -> None:
        """Record that the trainer has saved a checkpoint of a version."""
        await self.ledger.commit_version(commit)
        self.ledger_progress = self.ledger.progress()

    async def register_trainer(self) -> TrainerRegistration:
        """Register a new trainer, which starts at the committed version and gets all later batches, unchanged."""
        async with self._numbering_lock:
            registration = await self.ledger.register_trainer()
            self._rewind_to_committed()
        return registration

    async def drop_open_groups(self) -> None:
        """Drop all open groups with the reason RUN_ENDED. Raises OperationInvalid before the last batch is formed."""
        if not self.admission.is_finished:
            raise OperationInvalid(f"the run cannot finish: batch {self.admission.next_step} is not formed yet")
        for group in self.ledger.open_groups():
            await self.drop_group(group.number, DropReason.RUN_ENDED)

    # -- groups --------------------------------------------------------------------------------------------------

    def _rewind_to_committed(self) -> None:
        self.ledger_progress = self.ledger.progress()
        committed = self.ledger_progress.committed
        self.admission.rewind(committed, {batch.step: batch.group_numbers for batch in self.ledger.batches(committed)})

    @asynccontextmanager
    async def _lock_group(self, group_number: int) -> AsyncGenerator[GroupTracker | None]:
        """Lock a group and yield its tracker; None if the group is in a batch or was dropped."""
        lock = self._group_locks.get(group_number)
        if lock is None:
            yield None
            return
        async with lock:
            yield self._trackers.get(group_number)

    def _track_group(self, group: GroupRecord) -> GroupTracker:
        source = self.sources[group.source]
        tracker = GroupTracker(
            group.number,
            group.size,
            max_tries=source.max_tries,
            min_group_size=self.scoring_rules.min_group_size,
            group_rewards=source.group_rewards,
        )
        self._groups[group.number], self._trackers[group.number] = group, tracker
        self._group_locks[group.number] = asyncio.Lock()
        return tracker

    async def _restore_group(self, group: GroupRecord) -> None:
        """Restore a group that an earlier process issued."""
        if group.source not in self.sources:
            detail = f"source {group.source!r} was removed from the configuration"
            await self.ledger.drop_group(group.number, DropReason.CANCELLED, detail)
            return
        tracker = self._track_group(group)
        attempts = self.ledger.attempts(group.number)
        dropped = [attempt for attempt in attempts if attempt.state is GroupState.DROPPED]
        tracker.restore(
            {
                attempt.attempt_index: self.ledger.store.read_traces(attempt.rollout_id)
                for attempt in attempts
                if attempt.rollout_id is not None and attempt.state is not GroupState.DROPPED
            },
            {attempt.attempt_index: attempt.notes.get("failure", "") for attempt in dropped},
            {attempt.attempt_index: attempt.num_tries for attempt in attempts},
        )
        self.admission.restore_group(group.number)
        for pending in tracker.pending_attempts:
            self.attempt_queue.push(group.number, pending, is_retry=True)
        if group.state is GroupState.SCORED:
            stored = self.ledger.get_reference_scores(group.number)
            reference_scores = decode_scores(stored) if stored is not None else None
            if reference_scores and uses_top_logprobs(self.sources[group.source].algorithm, tracker.traces):
                top_logprobs = read_top_logprobs(self.ledger.store.path, group.number)
                reference_scores = {
                    key: replace(score, top_logprobs=top_logprobs.get(key)) for key, score in reference_scores.items()
                }
            state_before = self.ledger.get_algorithm_state_before(group.number)
            scored = score_complete_group(
                tracker, self.sources[group.source], self.scoring_rules, reference_scores, state_before
            )
            if scored.batch_group is None or scored.forest is None:  # other filters or another algorithm than before
                await self.drop_group(group.number, scored.drop_reason or DropReason.CANCELLED, scored.drop_detail)
                return
            self.admission.mark_scored(group.number)
            self._scored_groups[group.number] = (scored.batch_group, scored.forest)
        elif tracker.progress is GroupProgress.TOO_FEW:
            await self.drop_group(group.number, DropReason.TOO_FEW, _describe_failures(tracker))

    async def _retry_or_drop(
        self, tracker: GroupTracker, attempt: int, outcome: AttemptOutcome, failure: Failure
    ) -> GroupProgress:
        message = format_failure(failure)
        if outcome is AttemptOutcome.RETRY:
            await self.ledger.retry_attempt(tracker.number, attempt, message)
            self.attempt_queue.push(tracker.number, attempt, is_retry=True)
            return GroupProgress.OPEN
        notes = {"failure": failure.name}
        await self.ledger.drop_attempt(tracker.number, attempt, DropReason.FAILED, message, notes)
        if tracker.progress is GroupProgress.TOO_FEW:
            await self._drop_locked_group(tracker.number, DropReason.TOO_FEW, _describe_failures(tracker))
        return tracker.progress

    async def _write_top_logprobs(self, group_number: int, reference_scores: NodeScores | None) -> None:
        """Write the likeliest tokens of a group, so that they are on disk before the group is scored."""
        top_logprobs = {
            key: score.top_logprobs for key, score in (reference_scores or {}).items() if score.top_logprobs is not None
        }
        if top_logprobs:
            await asyncio.to_thread(write_top_logprobs, self.ledger.store.path, group_number, top_logprobs)

    async def _drop_locked_group(
        self, group_number: int, reason: DropReason, detail: str, states: Mapping[str, Any] | None = None
    ) -> None:
        """Drop a group whose lock is held."""
        await self.ledger.drop_group(group_number, reason, detail, states=states)
        remove_top_logprobs(self.ledger.store.path, group_number)
        self.untrainable_groups.record_dropped(reason)
        self.admission.drop_group(group_number)
        self.attempt_queue.remove_group(group_number)
        self._untrack_group(group_number)

    def _untrack_group(self, group_number: int) -> None:
        self._scored_groups.pop(group_number, None)
        del self._trackers[group_number], self._groups[group_number], self._group_locks[group_number]

    def _build_record(
        self, group_number: int, attempt: int, traces: Sequence[Trace], summary: dict[str, Any] | None
    ) -> RolloutRecord:
        group, rollout_id = self._groups[group_number], build_rollout_id(group_number, attempt)
        task, reward = str(group.task_number), traces[0].reward if traces else None
        return RolloutRecord(rollout_id, task, attempt, group.source, reward, summary=summary or {})


def check_task_counts(ledger: Ledger, sources: Mapping[str, SourceSpec]) -> None:
    """Raise ConfigInvalid if the number of tasks of a source with epochs has changed since the run was started."""
    task_counts = ledger.sources()
    for source in sources.values():
        before, now = task_counts.get(source.name), source.tasks_per_epoch
        if before is not None and now is not None and now != before:
            raise ConfigInvalid(
                f"train source {source.name}: its taskset has {now} tasks, but the run was started with {before}; "
                f"restore the tasks, or start over with --fresh or another --name"
            )


def format_failure(failure: Failure) -> str:
    """Return a failure as the text that the ledger stores."""
    return f"{failure.name}: {failure.message}"


def _describe_failures(tracker: GroupTracker) -> str:
    names = sorted(set(tracker.failed_attempts.values()))
    return f"{len(tracker.failed_attempts)} of {tracker.size} attempts failed: {', '.join(names)}"
