"""What can become of a group of attempts, and of each attempt in it.

    issued -> sampled -> scored -> batched -> trained
       |         |          |
       +---------+----------+----> dropped, for a reason that has a name

A group that is in a batch stays in it: the batch is served until its step is part of the history, then it is trained.
Only a person who rolls the history back (`ramify rollback`) makes groups that were trained batched again.
"""

from enum import Enum

from ramify.errors import TransitionRefused


class GroupState(Enum):
    """Where a group or an attempt stands. An attempt follows its group from `scored` on, unless it was dropped."""

    ISSUED = "issued"
    SAMPLED = "sampled"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def is_final(self) -> bool:
        """Whether nothing can follow."""
        return not TRANSITIONS[self]


TRANSITIONS = {
    GroupState.ISSUED: {GroupState.SAMPLED, GroupState.DROPPED},
    GroupState.SAMPLED: {GroupState.SCORED, GroupState.DROPPED},
    GroupState.SCORED: {GroupState.BATCHED, GroupState.DROPPED},
    GroupState.BATCHED: {GroupState.TRAINED},
    GroupState.TRAINED: set[GroupState](),
    GroupState.DROPPED: set[GroupState](),
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


def check_transition(subject: str, current: GroupState, target: GroupState) -> None:
    """Raise TransitionRefused unless `then` may follow `now`."""
    if target not in TRANSITIONS[current]:
        may = " or ".join(sorted(state.value for state in TRANSITIONS[current])) or "nothing else"
        raise TransitionRefused(f"{subject} is {current.value} and cannot become {target.value}: {may} may follow")
