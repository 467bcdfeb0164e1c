"""Which token cost a rollout its reward: the change of the expected reward at each token, estimated from its group.

The attempts of a group begin with the same tokens and part one after another. The mean reward of the attempts that
share the tokens up to one estimates what could be expected there. Where attempts part, the mean changes; a large drop
marks the token at which this rollout left the better attempts.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ramify.trace import Trace
from ramify.trace.columns import Int32Array

MAX_COMPARED_TOKENS = 5_000_000  # of all attempts together

FloatArray = npt.NDArray[np.float64]


def compute_reward_changes(
    trace: Trace, others: Sequence[tuple[Trace, float]], reward: float
) -> Mapping[int, FloatArray]:
    """Return the changes at the tokens of each node; `others` are the other attempts with their rewards."""
    paths = [[branch.token_ids for branch in other.branches] for other, _ in others]
    num_tokens = sum(len(path) for attempt in paths for path in attempt)
    if not others or num_tokens > MAX_COMPARED_TOKENS:
        return {}
    rewards = np.array([reward, *(other_reward for _, other_reward in others)])
    changes: dict[int, FloatArray] = {}
    for branch in trace.branches:
        tokens = branch.token_ids
        shared = [max(_count_shared(tokens, path) for path in attempt) if attempt else 0 for attempt in paths]
        column = _compute_changes(np.array([len(tokens), *shared]), rewards, len(tokens))
        start = 0
        for node in branch.nodes:
            stop = start + len(node.token_ids)
            changes[node.index] = column[start:stop]
            start = stop
    return changes


def _compute_changes(shared: npt.NDArray[np.int64], rewards: FloatArray, length: int) -> FloatArray:
    """Return the change at each of `length` tokens; `shared` is how many of them each attempt has in common."""
    changes = np.zeros(length)
    for depth in np.unique(shared[shared < length]):
        changes[depth] = rewards[shared > depth].mean() - rewards[shared >= depth].mean()
    return changes


def _count_shared(tokens: Int32Array, other: Int32Array) -> int:
    """Return the length of the common prefix."""
    length = min(len(tokens), len(other))
    different = np.flatnonzero(tokens[:length] != other[:length])
    return int(different[0]) if len(different) else length
