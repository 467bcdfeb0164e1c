"""What can become of a group of attempts, and of each attempt in it.

    issued -> sampled -> scored -> batched -> trained
       |         |          |
       +---------+----------+----> dropped, for a reason that has a name

A group that is in a batch stays in it: the batch is served until its step is part of the history, then it is trained.
Only a person who rolls the history back (`ramify rollback`) makes groups that were trained batched again.
"""

from enum import Enum

from ramify.errors import TransitionRefused


class State(Enum):
    """Where a group or an attempt stands. An attempt follows its group from `scored` on, unless it was dropped."""

    ISSUED = "issued"
    SAMPLED = "sampled"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def over(self) -> bool:
        """Whether nothing can follow."""
        return not FOLLOWS[self]


FOLLOWS = {
    State.ISSUED: {State.SAMPLED, State.DROPPED},
    State.SAMPLED: {State.SCORED, State.DROPPED},
    State.SCORED: {State.BATCHED, State.DROPPED},
    State.BATCHED: {State.TRAINED},
    State.TRAINED: set[State](),
    State.DROPPED: set[State](),
}


class DropReason(Enum):
    """Why a group or an attempt is not trained on; the row's `detail` says more."""

    FAILED = "failed"  # an attempt whose failures were the system's, every time it was run
    TOO_FEW = "too_few"  # a group with fewer attempts left than `min_group`
    UNSCORED = "unscored"  # a reward of the whole group did not run
    FILTERED = "filtered"  # `detail` names the filters
    NOT_FINITE = "not_finite"  # an advantage, weight or logprob that is no finite float32; `detail` names the token
    NOTHING_TRAINABLE = "nothing_trainable"  # no token of the policy, or no path within `seq_len`
    CANCELLED = "cancelled"  # the user, or a source that was taken away
    RUN_ENDED = "run_ended"  # the run reached its last step first


def check_follows(what: str, now: State, then: State) -> None:
    """Raise TransitionRefused unless `then` may follow `now`."""
    if then not in FOLLOWS[now]:
        may = " or ".join(sorted(state.value for state in FOLLOWS[now])) or "nothing else"
        raise TransitionRefused(f"{what} is {now.value} and cannot become {then.value}: {may} may follow")
