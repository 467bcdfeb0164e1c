"""The state of one group, and the queue of attempts to dispatch.

A group is complete when every attempt has an episode or was dropped after system failures. A failure of the policy is a
result like any other. After a failure of the system, or if a reward is missing, an attempt says nothing about the
policy: it is retried a few times and then dropped. A group with fewer than `min_group_size` attempts left has nothing
to compare and is dropped. State machines without clock or I/O.

    attempt:  in flight --> kept | retried (in flight again) | dropped
    group:    open --> complete | too few
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from ramify.core.errors import Failure
from ramify.trace import Trace


class QueuedAttempt(NamedTuple):
    """An attempt to dispatch."""

    group: int
    attempt: int


class AttemptQueue:
    """Attempts that wait, retries first and then in the order of issue, and those in flight."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, int, int]] = []  # heap of (is first try, group, attempt)
        self._in_flight: set[tuple[int, int]] = set()

    @property
    def num_in_flight(self) -> int:
        """Number of attempts that were popped and are not done."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Number of attempts in the queue."""
        return len(self._waiting)

    def push(self, group: int, attempt: int, *, is_retry: bool = False) -> None:
        """Queue an attempt."""
        heapq.heappush(self._waiting, (not is_retry, group, attempt))

    def pop(self, limit: int, can_dispatch: Callable[[int], bool] = lambda group: True) -> QueuedAttempt | None:
        """Return the next attempt; None if `limit` are in flight or its group may not be dispatched."""
        if not self._waiting or self.num_in_flight >= limit or not can_dispatch(self._waiting[0][1]):
            return None
        _, group, attempt = heapq.heappop(self._waiting)
        self._in_flight.add((group, attempt))
        return QueuedAttempt(group, attempt)

    def mark_done(self, group: int, attempt: int) -> None:
        """Record that an attempt is no longer in flight, however it ended."""
        self._in_flight.discard((group, attempt))

    def remove_group(self, group: int) -> None:
        """Forget all attempts of a group, waiting and in flight."""
        self._waiting = [entry for entry in self._waiting if entry[1] != group]
        heapq.heapify(self._waiting)
        self._in_flight = {key for key in self._in_flight if key[0] != group}


MISSING_REWARD = Failure("EnvironmentFault", "a reward is missing", "system", True)


class AttemptOutcome(Enum):
    """What happens to an attempt that returned."""

    KEPT = "kept"
    RETRY = "retry"
    DROPPED = "dropped"


class GroupProgress(Enum):
    """Whether a group waits for attempts (OPEN), can be scored (COMPLETE), or must be dropped (TOO_FEW)."""

    OPEN = "open"
    COMPLETE = "complete"
    TOO_FEW = "too_few"


class GroupTracker:
    """The attempts of one group: which are pending, which have an episode, how often each was tried.

    `max_tries` limits the tries of one attempt. `group_rewards` names the rewards that compare all attempts, which may
    be missing until the group is complete.

    Attributes:
        rollouts: traces of the kept attempts, by attempt.
        failed_attempts: name of the last failure of the dropped attempts, by attempt.
    """

    def __init__(
        self,
        number: int,
        size: int,
        *,
        max_tries: int = 3,
        min_group_size: int = 2,
        group_rewards: frozenset[str] = frozenset(),
    ) -> None:
        self.number, self.size = number, size
        self.rollouts: dict[int, tuple[Trace, ...]] = {}
        self.failed_attempts: dict[int, str] = {}
        self._max_tries, self._group_rewards = max_tries, group_rewards
        self._min_attempts = min(min_group_size, size)
        self._num_tries = dict.fromkeys(range(size), 1)

    @property
    def pending_attempts(self) -> list[int]:
        """Attempts that are neither kept nor dropped."""
        return [attempt for attempt in self._num_tries if self.is_pending(attempt)]

    def is_pending(self, attempt: int) -> bool:
        """Return whether an attempt is neither kept nor dropped."""
        return attempt not in self.rollouts and attempt not in self.failed_attempts

    @property
    def progress(self) -> GroupProgress:
        """Whether the group is open, complete, or has too few attempts left."""
        if self.size - len(self.failed_attempts) < self._min_attempts:
            return GroupProgress.TOO_FEW
        return GroupProgress.OPEN if self.pending_attempts else GroupProgress.COMPLETE

    @property
    def traces(self) -> list[Trace]:
        """Traces of all kept attempts, in the order of the attempts."""
        return [trace for attempt in sorted(self.rollouts) for trace in self.rollouts[attempt]]

    def record_episode(self, attempt: int, traces: Sequence[Trace]) -> AttemptOutcome:
        """Record the episode of an attempt, or a failure if the system failed or a reward is missing."""
        if (failure := find_attempt_failure(traces, self._group_rewards)) is not None:
            return self.record_failure(attempt, failure)
        self.rollouts[attempt] = tuple(traces)
        return AttemptOutcome.KEPT

    def record_failure(self, attempt: int, failure: Failure) -> AttemptOutcome:
        """Record an attempt without a usable episode: it is retried or, after `max_tries`, dropped."""
        if failure.retryable and self._num_tries[attempt] < self._max_tries:
            self._num_tries[attempt] += 1
            return AttemptOutcome.RETRY
        self.failed_attempts[attempt] = failure.name
        return AttemptOutcome.DROPPED

    def restore(
        self,
        rollouts: Mapping[int, Sequence[Trace]],
        failed_attempts: Mapping[int, str],
        num_tries: Mapping[int, int],
    ) -> None:
        """Restore the state from the ledger; attempts with neither rollout nor failure are pending."""
        self.rollouts = {attempt: tuple(traces) for attempt, traces in rollouts.items()}
        self.failed_attempts = dict(failed_attempts)
        self._num_tries |= num_tries


def find_attempt_failure(traces: Sequence[Trace], group_rewards: Collection[str]) -> Failure | None:
    """Return why an episode says nothing about the policy: a failure of the system, or a missing reward; else None."""
    if failures := list_system_failures(traces):
        return failures[0]
    missing = {name for trace in traces for name, reward in trace.rewards.items() if reward is None}
    return MISSING_REWARD if not traces or missing.difference(group_rewards) else None


def list_system_failures(traces: Sequence[Trace]) -> list[Failure]:
    """Return the failures of an episode that are not the policy's."""
    return [error for trace in traces for error in trace.errors if error.blame == "system"]
