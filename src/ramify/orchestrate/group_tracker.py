"""When a group is complete: every attempt came back, or left because what happened to it was not the policy's doing.

A failure of the policy is a result like any other. After a failure of the system, or with a reward still missing, an
attempt says nothing: it is run again, a few times, and then leaves. A group left with fewer than `min_group` has
nothing to compare and is dropped. A state machine without clock or I/O.

    attempt:  out --> kept | again (out once more) | lost
    group:    open --> complete | too few
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from ramify.errors import Failure
from ramify.trace import Trace

MISSING_REWARD = Failure("EnvironmentFault", "a reward was due and did not run", "system", True)


class AttemptOutcome(Enum):
    """What becomes of an attempt that came back."""

    KEPT = "kept"
    RETRY = "again"
    DROPPED = "lost"


class GroupProgress(Enum):
    """Where a group stands."""

    OPEN = "open"
    COMPLETE = "complete"
    TOO_FEW = "too_few"


class GroupTracker:
    """The attempts of one group: which are out, which came back, how often each was run.

    `tries` is how often an attempt is run at most; `group_rewards` are those that only the whole group can have.
    """

    def __init__(
        self,
        number: int,
        size: int,
        *,
        max_tries: int = 3,
        min_group: int = 2,
        group_rewards: frozenset[str] = frozenset(),
    ) -> None:
        self.number, self.size = number, size
        self.rollouts: dict[int, tuple[Trace, ...]] = {}
        self.failed_attempts: dict[int, Failure] = {}
        self._max_tries, self._group_rewards = max_tries, group_rewards
        self._min_attempts = min(min_group, size)
        self._num_tries = dict.fromkeys(range(size), 1)

    @property
    def pending_attempts(self) -> list[int]:
        """Attempts that have not come back for good."""
        return [
            attempt
            for attempt in self._num_tries
            if attempt not in self.rollouts and attempt not in self.failed_attempts
        ]

    @property
    def progress(self) -> GroupProgress:
        if self.size - len(self.failed_attempts) < self._min_attempts:
            return GroupProgress.TOO_FEW
        return GroupProgress.OPEN if self.pending_attempts else GroupProgress.COMPLETE

    @property
    def traces(self) -> list[Trace]:
        """All traces that are left, in the order of the attempts."""
        return [trace for attempt in sorted(self.rollouts) for trace in self.rollouts[attempt]]

    def get_num_tries(self, attempt: int) -> int:
        """How often an attempt was sent out."""
        return self._num_tries[attempt]

    def record_episode(self, attempt: int, traces: Sequence[Trace]) -> AttemptOutcome:
        """An attempt came back with its episode."""
        failures = filter(None, (find_system_failure(trace, self._group_rewards) for trace in traces))
        failure = next(failures, None) if traces else MISSING_REWARD
        if failure is not None:
            return self.record_failure(attempt, failure)
        self.rollouts[attempt] = tuple(traces)
        return AttemptOutcome.KEPT

    def record_failure(self, attempt: int, failure: Failure) -> AttemptOutcome:
        """An attempt came back with nothing that could be used."""
        if failure.retryable and self._num_tries[attempt] < self._max_tries:
            self._num_tries[attempt] += 1
            return AttemptOutcome.RETRY
        self.failed_attempts[attempt] = failure
        return AttemptOutcome.DROPPED

    def restore(
        self,
        rollouts: Mapping[int, Sequence[Trace]],
        failed_attempts: Mapping[int, Failure],
        num_tries: Mapping[int, int],
    ) -> None:
        """Go on from what the ledger knows: only `missing` attempts have to be sent out again."""
        self.rollouts = {attempt: tuple(traces) for attempt, traces in rollouts.items()}
        self.failed_attempts = dict(failed_attempts)
        self._num_tries |= num_tries


def find_system_failure(trace: Trace, group_rewards: frozenset[str]) -> Failure | None:
    """What keeps a trace from counting: a failure that was not the policy's, or a reward of its own that is due."""
    found = next((error for error in trace.errors if error.blame == "system"), None)
    if found is None and any(trace.rewards[name] is None for name in trace.rewards if name not in group_rewards):
        return MISSING_REWARD
    return found
