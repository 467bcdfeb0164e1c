"""Runs the attempts that the core issues on env servers, and reports their results to the core.

Every attempt is an asyncio task that ends in exactly one call of the core, which is never cancelled. A failure of the
env server is handled like any other failure of an attempt.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramify.core.errors import EnvironmentChanged, Failure, ModelUnsupported, RamifyError
from ramify.core.seeds import derive_seed
from ramify.env.task import compute_content_digest
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.core import OrchestratorCore, format_failure
from ramify.orchestrate.group_scoring import build_rollout_id
from ramify.orchestrate.group_tracker import GroupProgress, QueuedAttempt, list_system_failures
from ramify.orchestrate.reference_scores import ReferenceScorer
from ramify.run.store.group_state import DropReason
from ramify.run.store.ledger import GroupRecord
from ramify.run.store.summary import REVISION_KEY, find_agent_failure, summarize_rollout
from ramify.trace import Trace


class AttemptDispatcher:
    """The attempts in flight.

    `get_limit` returns the current limit of attempts in flight. `on_group_scored` gets every scored group, its traces,
    whether it can be trained on, and which filters fired on each trace. `on_failure` gets the name of a source and a
    failure. `reference_scorer` asks other models for the scores that an algorithm needs.

    Attributes:
        weights_ready: set while the engines serve the current policy version; nothing is dispatched otherwise.
        batch_formed: set when a batch was formed.
    """

    def __init__(
        self,
        core: OrchestratorCore,
        sources: Mapping[str, ConnectedSource],
        *,
        seed: int,
        get_limit: Callable[[], int],
        on_group_scored: Callable[[GroupRecord, list[Trace], bool, dict[str, list[bool]]], None],
        on_failure: Callable[[str, Failure], None],
        reference_scorer: ReferenceScorer | None = None,
    ) -> None:
        self._core, self.sources, self._seed = core, sources, seed
        self.reference_scorer = reference_scorer or ReferenceScorer({})
        self._get_limit, self._on_group_scored, self._on_failure = get_limit, on_group_scored, on_failure
        self._tasks: dict[QueuedAttempt, asyncio.Task[None]] = {}
        self._started_at: dict[QueuedAttempt, tuple[str, float]] = {}  # source and monotonic time of each attempt
        self._call_outcomes: dict[QueuedAttempt, str] = {}  # how the call to an env server ended
        self._finalizing: set[int] = set()
        self._wake = asyncio.Event()
        self.weights_ready = asyncio.Event()
        self.batch_formed = asyncio.Event()

    def wake(self) -> None:
        """Check again whether attempts can be dispatched."""
        self._wake.set()

    @property
    def num_in_flight(self) -> int:
        """Number of attempts in flight."""
        return len(self._tasks)

    def describe_oldest_attempt(self) -> str:
        """Describe the attempt that has been in flight longest, and where it is; there must be one."""
        key, (name, started_at) = min(self._started_at.items(), key=lambda item: item[1][1])
        source, rollout_id = self.sources[name], build_rollout_id(*key)
        if key in self._call_outcomes:  # its result is recorded, its group is scored, or it waits before a retry
            where = f", {self._call_outcomes[key]}"
        else:
            address = source.servers.find_address(rollout_id)
            where = ", not sent yet" if address is None else f" at {address}"
        seconds, timeout = time.monotonic() - started_at, source.attempt_timeout
        return f"oldest attempt {rollout_id}: {seconds:.0f} s (timeout {timeout:g} s), source {name}{where}"

    async def run(self) -> None:
        """Issue groups and dispatch their attempts until cancelled."""
        async with asyncio.TaskGroup() as task_group:
            # Groups that an earlier process left unscored. The run may end and drop them meanwhile.
            while numbers := self._core.get_groups_to_score():
                await self._finalize_group(numbers[0])
            while True:
                await self.weights_ready.wait()
                self._wake.clear()
                await self._core.issue_groups()
                # If the sources are exhausted, the last batch may be smaller and needs no further group.
                if await self._core.form_batches() or self._core.admission.is_finished:
                    self.batch_formed.set()
                while (next_attempt := self._core.next_attempt(self._get_limit())) is not None:
                    self._start_attempt(task_group, *next_attempt)
                await self._wake.wait()

    def _start_attempt(self, task_group: asyncio.TaskGroup, group: GroupRecord, key: QueuedAttempt) -> None:
        work = self._run_attempt(group, key.attempt)
        task = task_group.create_task(work, name=f"attempt {build_rollout_id(*key)}")
        self._tasks[key], self._started_at[key] = task, (group.source, time.monotonic())
        self._call_outcomes.pop(key, None)
        task.add_done_callback(lambda task: self._on_attempt_done(key, task))

    def _on_attempt_done(self, key: QueuedAttempt, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # a retry may have replaced it already
            del self._tasks[key], self._started_at[key]
            self._call_outcomes.pop(key, None)
        self.wake()

    async def _run_attempt(self, group: GroupRecord, attempt: int) -> None:
        core, source, key = self._core, self.sources[group.source], QueuedAttempt(group.number, attempt)
        try:
            task = await source.tasks.get_task(group.task_number)
            if source.num_tasks is None and attempt == 0:
                core.ledger.queue_task_digest(group.source, group.task_number, compute_content_digest(task))
            result = await source.servers.run(
                task,
                id=build_rollout_id(group.number, attempt),
                group=str(group.number),
                attempt=attempt,
                seed=derive_seed(f"{self._seed}:{group.number}"),
                train=True,
                environment_digest=source.environment_digest,
                timeout=source.get_attempt_timeout(task),
            )
            traces = list(result.episode.traces)
        except EnvironmentChanged:
            raise  # every further attempt would run in another environment
        except RamifyError as error:
            self._on_failure(group.source, failure := Failure.from_exception(error))
            self._call_outcomes[key] = f"failed with {failure.name}"  # maybe before it was sent
            await source.wait_before_retry(failure)  # even without a retry: the next group would fail right away
            progress = await asyncio.shield(core.record_failure(group.number, attempt, failure))
        else:
            self._call_outcomes[key] = "returned by its env server"
            for failure in list_system_failures(traces) or filter(None, [find_agent_failure(traces)]):
                self._on_failure(group.source, failure)
            summary = self._build_summary(group, traces)
            recording = core.record_attempt(group.number, attempt, traces, summary, result.encoded_episode)
            progress = await asyncio.shield(recording)
        if progress is GroupProgress.COMPLETE and group.number not in self._finalizing:
            await self._finalize_group(group.number)
        elif progress is GroupProgress.TOO_FEW:
            self._cancel_group(group.number)

    async def _finalize_group(self, group_number: int) -> None:
        """Score a complete group, and form the batches that become possible."""
        self._finalizing.add(group_number)  # attempts that return together all find the group complete
        try:
            await self._score_group(group_number)
        finally:
            self._finalizing.discard(group_number)
            self.wake()

    async def _score_group(self, group_number: int) -> None:
        group, traces = self._core.get_group(group_number), self._core.get_traces(group_number)
        source, summaries = self.sources[group.source], dict[int, dict[str, Any]]()
        if source.group_rewards:
            try:
                await source.add_group_rewards(traces, lambda failure: self._on_failure(source.name, failure))
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                detail = format_failure(Failure.from_exception(error))
                await self._core.drop_group(group_number, DropReason.UNSCORED, detail)
                return
            for attempt in {trace.attempt for trace in traces}:
                episode = [trace for trace in traces if trace.attempt == attempt]
                summaries[attempt] = self._build_summary(group, episode)
        try:
            algorithm = self._core.sources[group.source].algorithm
            reference_scores = await self.reference_scorer.score(group, traces, algorithm)
        except ModelUnsupported:
            raise  # no group of the source could be scored
        except RamifyError as error:
            self._on_failure(source.name, failure := Failure.from_exception(error))
            await self._core.drop_group(group_number, DropReason.UNSCORED, format_failure(failure))
            return
        scored = await self._core.score_group(group_number, summaries, reference_scores)
        if scored is not None:
            self._on_group_scored(group, traces, scored.batch_group is not None, scored.fired_by_filter)
        if await self._core.form_batches():
            self.batch_formed.set()

    def _build_summary(self, group: GroupRecord, traces: Sequence[Trace]) -> dict[str, Any]:
        return {**summarize_rollout(traces), REVISION_KEY: self.sources[group.source].revision}

    def _cancel_group(self, group_number: int) -> None:
        for key in [key for key in self._tasks if key[0] == group_number]:
            if self._tasks[key] is not asyncio.current_task():
                self._tasks[key].cancel()
