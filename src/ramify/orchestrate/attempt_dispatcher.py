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
from ramify.orchestrate.attempt_queue import QueuedAttempt
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.group_tracker import GroupProgress
from ramify.orchestrate.scoring import build_rollout_id
from ramify.orchestrate.task_cache import TaskCache
from ramify.store.group_state import DropReason
from ramify.store.ledger import GroupRecord
from ramify.store.summary import REVISION_KEY, UNRECORDED_REVISION, summarize_rollout
from ramify.trace import Trace

RETRY_DELAY = 1.0  # seconds before an attempt is sent again to a server that did not answer
SERVER_FAILURES = ("PeerLost", "WorkerDied")  # failures of the server rather than of the attempt


@dataclass(frozen=True, slots=True)
class ConnectedSource:
    """A source as the orchestrator reaches it."""

    name: str
    client: EnvClient
    tasks: TaskCache
    has_group_rewards: bool  # whether it has rewards that only a whole group can have
    attempt_timeout: float  # seconds one attempt may take, its waiting included, at a task without a limit of its own
    max_tries: int  # how often an attempt is made
    server_timeout: float  # seconds for its server to be back
    num_tasks: int | None = None  # of its tasks; None if there is no end of them
    environment_digest: str = ""  # the digest of the environment, as it was checked when the run started
    revision: int = UNRECORDED_REVISION  # of the environment

    def get_attempt_timeout(self, task: Mapping[str, Any]) -> float:
        """Return the seconds that one attempt at a task may take, given its wire form.

        The task's own limit is added although it replaces that of the harness: each phase has its exact limit in the
        worker, and this deadline only has to be later.
        """
        return self.attempt_timeout + float(task.get("timeout") or 0.0)

    async def wait_before_retry(self, failure: Failure) -> None:
        """Before the next try. A server without workers, or gone, is waited for: that is one failure, not many."""
        await asyncio.sleep(RETRY_DELAY)
        end = time.monotonic() + self.server_timeout
        while failure.name in SERVER_FAILURES and time.monotonic() < end:
            with contextlib.suppress(RamifyError):
                if (await self.client.health()).state == "ok":
                    return
            await asyncio.sleep(RETRY_DELAY)

    async def add_group_rewards(self, traces: Sequence[Trace], on_failure: Callable[[Failure], None]) -> None:
        """The rewards that only the whole group has, asked for as often as an attempt may be made."""
        for left in reversed(range(self.max_tries)):
            try:
                found = await self.client.score_group(
                    traces[0].task, traces, environment_digest=self.environment_digest, timeout=self.attempt_timeout
                )
                if (unscored := next((failure for each in found.errors for failure in each), None)) is not None:
                    raise unscored.to_exception()  # a reward that did not run: without it the group is worth nothing
            except RamifyError as error:
                on_failure(failure := Failure.from_exception(error))
                if not left or not failure.retryable:
                    raise
                await self.wait_before_retry(failure)
                continue
            for trace, rewards in zip(traces, found.rewards, strict=True):
                trace.rewards.update(rewards)
            return


class AttemptDispatcher:
    """Attempts that are out.

    `settled` is told every group that was judged, whether it can be trained on, and what each filter fired on.
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
    ) -> None:
        self._core, self.sources, self._seed = core, sources, seed
        self._get_limit, self._on_group_scored, self._on_failure = get_limit, on_group_scored, on_failure
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._started_at: dict[tuple[int, int], tuple[str, float]] = {}  # (source, when) of every attempt that is out
        self._finalizing: set[int] = set()
        self._wake = asyncio.Event()
        self.weights_ready = asyncio.Event()  # closed while the engines do not serve what the run stands at
        self.batch_formed = asyncio.Event()  # set whenever a batch was decided

    def wake(self) -> None:
        """Something changed: there may be room for more."""
        self._wake.set()

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    def get_oldest_attempt(self) -> tuple[str, str, float] | None:
        """The attempt that is out for longest: its id, its source, and the seconds."""
        if not self._started_at:
            return None
        key, (source, since) = min(self._started_at.items(), key=lambda each: each[1][1])
        return build_rollout_id(*key), source, time.monotonic() - since

    async def run(self) -> None:
        """Issue and dispatch, for ever."""
        async with asyncio.TaskGroup() as attempts:
            while (
                waiting := self._core.get_groups_to_score()
            ):  # asked anew each time: the run may end meanwhile, and drop them
                await self._finalize_group(waiting[0])
            while True:
                await self.weights_ready.wait()
                self._wake.clear()
                await self._core.issue_groups()
                if (
                    await self._core.form_batches() or self._core.admission.is_finished
                ):  # where no group follows, a short one
                    self.batch_formed.set()
                while (taken := self._core.next_attempt(self._get_limit())) is not None:
                    self._start_attempt(attempts, *taken)
                await self._wake.wait()

    def _start_attempt(self, task_group: asyncio.TaskGroup, group: GroupRecord, queued: QueuedAttempt) -> None:
        key = (queued.group, queued.attempt)
        task = task_group.create_task(self._run_attempt(group, queued), name=f"attempt {build_rollout_id(*key)}")
        self._tasks[key], self._started_at[key] = task, (group.source, time.monotonic())
        task.add_done_callback(lambda task: self._on_attempt_done(key, task))

    def _on_attempt_done(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # it may be out again already
            del self._tasks[key], self._started_at[key]
        self.wake()

    async def _run_attempt(self, group: GroupRecord, queued: QueuedAttempt) -> None:
        source = self.sources[group.source]
        core, attempt = self._core, queued.attempt
        try:
            task = await source.tasks.get_task(group.task_number)
            if source.num_tasks is None and attempt == 0:
                core.ledger.queue_task_digest(group.source, group.task_number, compute_content_digest(task))
            ran = await source.client.run(
                task,
                id=build_rollout_id(group.number, attempt),
                group=str(group.number),
                attempt=attempt,
                seed=derive_seed(self._seed, group.number),
                train=True,
                max_tries=1,
                environment_digest=source.environment_digest,
                timeout=source.get_attempt_timeout(task),
            )
            traces = list(ran.episode.traces)
        except EnvironmentChanged:
            raise  # every further attempt would run in another environment
        except RamifyError as error:
            self._on_failure(group.source, failure := Failure.from_exception(error))
            await source.wait_before_retry(
                failure
            )  # also where it is not tried again: the next group would fail as soon
            standing = await asyncio.shield(core.record_failure(group.number, attempt, failure))
        else:
            for error in (error for trace in traces for error in trace.errors if error.blame == "system"):
                self._on_failure(group.source, error)
            recording = core.record_attempt(
                group.number, attempt, traces, self._build_summary(group, traces), ran.encoded_episode
            )
            standing = await asyncio.shield(recording)
        if standing is GroupProgress.COMPLETE and group.number not in self._finalizing:
            await self._finalize_group(group.number)
        elif standing is GroupProgress.TOO_FEW:
            self._cancel_group(group.number)

    async def _finalize_group(self, group_number: int) -> None:
        """Let the whole group be compared where its source does that, judge it, and cut what can be cut."""
        self._finalizing.add(group_number)  # attempts that come back together find the group complete together
        try:
            await self._score_group(group_number)
        finally:
            self._finalizing.discard(group_number)
            self.wake()

    async def _score_group(self, group_number: int) -> None:
        group, traces = self._core.get_group(group_number), self._core.get_traces(group_number)
        source = self.sources[group.source]
        if source.has_group_rewards:
            try:
                await source.add_group_rewards(traces, lambda failure: self._on_failure(source.name, failure))
            except EnvironmentChanged:
                raise
            except RamifyError as error:
                await self._core.drop_group(group_number, DropReason.UNSCORED, f"{error.name}: {error.message}")
                return
        episodes = {trace.attempt: [other for other in traces if other.attempt == trace.attempt] for trace in traces}
        changed = {attempt: self._build_summary(group, each) for attempt, each in episodes.items()}
        if (
            judged := await self._core.score_group(group_number, changed if source.has_group_rewards else None)
        ) is not None:
            self._on_group_scored(group, traces, judged.batch_group is not None, judged.fired_by_filter)
        if await self._core.form_batches():
            self.batch_formed.set()

    def _build_summary(self, group: GroupRecord, traces: Sequence[Trace]) -> dict[str, Any]:
        return {**summarize_rollout(traces), REVISION_KEY: self.sources[group.source].revision}

    def _cancel_group(self, group_number: int) -> None:
        for key in [key for key in self._tasks if key[0] == group_number]:
            if self._tasks[key] is not asyncio.current_task():
                self._tasks[key].cancel()


def derive_seed(seed: int, key: int | str) -> int:
    """The seed of a group's attempts, which each draw from it for themselves."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=4).digest(), "big") >> 1
