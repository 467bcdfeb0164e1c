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

UNSCORED = Failure("EnvironmentFault", "a reward was due and did not run", "system", True)


class Fate(Enum):
    """What becomes of an attempt that came back."""

    KEPT = "kept"
    AGAIN = "again"
    LOST = "lost"


class Standing(Enum):
    """Where a group stands."""

    OPEN = "open"
    COMPLETE = "complete"
    TOO_FEW = "too_few"


class GroupRun:
    """The attempts of one group: which are out, which came back, how often each was run.

    `tries` is how often an attempt is run at most; `group_rewards` are those that only the whole group can have.
    """

    def __init__(
        self,
        number: int,
        size: int,
        *,
        tries: int = 3,
        min_group: int = 2,
        group_rewards: frozenset[str] = frozenset(),
    ) -> None:
        self.number, self.size = number, size
        self.rollouts: dict[int, tuple[Trace, ...]] = {}
        self.lost: dict[int, Failure] = {}
        self._tries, self._group_rewards = tries, group_rewards
        self._least = min(min_group, size)
        self._runs = dict.fromkeys(range(size), 1)

    @property
    def missing(self) -> list[int]:
        """Attempts that have not come back for good."""
        return [attempt for attempt in self._runs if attempt not in self.rollouts and attempt not in self.lost]

    @property
    def standing(self) -> Standing:
        if self.size - len(self.lost) < self._least:
            return Standing.TOO_FEW
        return Standing.OPEN if self.missing else Standing.COMPLETE

    @property
    def traces(self) -> list[Trace]:
        """All traces that are left, in the order of the attempts."""
        return [trace for attempt in sorted(self.rollouts) for trace in self.rollouts[attempt]]

    def runs(self, attempt: int) -> int:
        """How often an attempt was sent out."""
        return self._runs[attempt]

    def back(self, attempt: int, traces: Sequence[Trace]) -> Fate:
        """An attempt came back with its episode."""
        failures = filter(None, (system_failure(trace, self._group_rewards) for trace in traces))
        failure = next(failures, None) if traces else UNSCORED
        if failure is not None:
            return self.failed(attempt, failure)
        self.rollouts[attempt] = tuple(traces)
        return Fate.KEPT

    def failed(self, attempt: int, failure: Failure) -> Fate:
        """An attempt came back with nothing that could be used."""
        if failure.retryable and self._runs[attempt] < self._tries:
            self._runs[attempt] += 1
            return Fate.AGAIN
        self.lost[attempt] = failure
        return Fate.LOST

    def restore(
        self, kept: Mapping[int, Sequence[Trace]], lost: Mapping[int, Failure], runs: Mapping[int, int]
    ) -> None:
        """Go on from what the ledger knows: only `missing` attempts have to be sent out again."""
        self.rollouts = {attempt: tuple(traces) for attempt, traces in kept.items()}
        self.lost = dict(lost)
        self._runs |= runs


def system_failure(trace: Trace, group_rewards: frozenset[str]) -> Failure | None:
    """What keeps a trace from counting: a failure that was not the policy's, or a reward of its own that is due."""
    found = next((error for error in trace.errors if error.blame == "system"), None)
    if found is None and any(trace.rewards[name] is None for name in trace.rewards if name not in group_rewards):
        return UNSCORED
    return found
