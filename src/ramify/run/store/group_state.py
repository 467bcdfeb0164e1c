"""The state machine of groups and of their attempts.

    issued -> sampled -> scored -> batched -> trained
       |         |          |
       +---------+----------+----> dropped, with a DropReason

A group never leaves its batch: the batch is served until its step is committed, then the group is trained. Only
`ramify rollback` turns trained groups into batched ones again.
"""

from enum import Enum

from ramify.core.errors import OperationInvalid


class GroupState(Enum):
    """The state of a group or an attempt. From `scored` on, an attempt has the state of its group or is dropped."""

    ISSUED = "issued"
    SAMPLED = "sampled"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


TRANSITIONS = {
    GroupState.ISSUED: {GroupState.SAMPLED, GroupState.DROPPED},
    GroupState.SAMPLED: {GroupState.SCORED, GroupState.DROPPED},
    GroupState.SCORED: {GroupState.BATCHED, GroupState.DROPPED},
    GroupState.BATCHED: {GroupState.TRAINED},
    GroupState.TRAINED: set[GroupState](),
    GroupState.DROPPED: set[GroupState](),
}


class DropReason(Enum):
    """Why a group or an attempt is not trained on; the record's `detail` says more."""

    FAILED = "failed"  # every try of the attempt ended with a system failure
    TOO_FEW = "too_few"  # the group has fewer attempts left than `min_group_size`
    UNSCORED = "unscored"  # a group reward, or the scores of a teacher or reference, could not be computed
    FILTERED = "filtered"  # `detail` names the filters
    NOT_FINITE = "not_finite"  # an advantage, weight or logprob is not a finite float32; `detail` names the token
    BELOW_MIN_REWARD = "below_min_reward"  # no attempt reached `min_reward` of the algorithm `sft`
    NOTHING_TRAINABLE = "nothing_trainable"  # no token of the policy, or no path within `seq_len`
    CANCELLED = "cancelled"  # by the user, or because its source was removed
    RUN_ENDED = "run_ended"  # the run reached its last step first


def check_transition(subject: str, current: GroupState, target: GroupState) -> None:
    """Raise OperationInvalid if `target` is not a successor of `current`; `subject` names the group or attempt."""
    if target not in TRANSITIONS[current]:
        expected = " or ".join(sorted(state.value for state in TRANSITIONS[current])) or "no other state"
        raise OperationInvalid(f"{subject} is {current.value} and cannot become {target.value}: expected {expected}")
