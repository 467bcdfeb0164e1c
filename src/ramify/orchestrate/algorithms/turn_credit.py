"""Credit per turn: each turn is compared by what the rollout earned from that turn on.

The rewards of turns come from `@rf.turn_reward`; other rewards belong to no turn, so they count in all. The return of
turn k is the sum of the rewards of turns k, k + 1, ... The baseline of turn k is the mean return of the other rollouts
of the group from turn k on. A rollout that stopped before turn k earned nothing from there on and counts with that, so
that the baseline never depends on where rollouts stopped.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ramify.orchestrate.algorithms import Algorithm, FloatArray, get_trainable_nodes, group_by_agent
from ramify.trace import Annotation, Trace
from ramify.trace.header import TURN_REWARDS_KEY


class TurnCredit(Algorithm):
    """A of turn k = return of turn k − mean return of the other rollouts from turn k on; 0 for a group of one."""

    compares_attempts = True

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return one annotation for each sampled node, with the advantage of its turn."""
        annotations: list[Annotation] = []
        for traces, rewards in group_by_agent(group).values():
            for trace, advantages in zip(traces, compute_turn_advantages(traces, rewards), strict=True):
                turns = [node.index for node in trace.nodes if node.call is not None]
                advantage_by_node = dict(zip(turns, advantages.tolist()))
                annotations += [
                    Annotation(trace.id, node, advantage=advantage_by_node[node]) for node in get_trainable_nodes(trace)
                ]
        return annotations


def compute_turn_advantages(traces: Sequence[Trace], rewards: FloatArray) -> FloatArray:
    """Return the advantage of each turn of each rollout [rollouts, turns of the longest]."""
    num_turns = max(trace.num_turns for trace in traces)
    returns = np.stack([_compute_returns(trace, reward, num_turns) for trace, reward in zip(traces, rewards.tolist())])
    if len(traces) < 2:
        return np.zeros_like(returns)
    # If all returns are equal, rounding must not make an advantage.
    spread: npt.NDArray[np.bool_] = np.ptp(returns, axis=0) > 0
    return np.where(spread, returns - (returns.sum(0) - returns) / (len(traces) - 1), 0.0)


def _compute_returns(trace: Trace, reward: float, num_turns: int) -> FloatArray:
    """Return what a rollout earned from each turn on."""
    turn_rewards = np.zeros(num_turns)
    for name, values in trace.info.get(TURN_REWARDS_KEY, {}).items():
        score = trace.rewards[name]
        weight = 1.0 if score is None else score[1]
        turn_rewards[: len(values)] += [weight * (value or 0.0) for value in values]
    other_rewards = reward - turn_rewards.sum()
    return other_rewards + turn_rewards[::-1].cumsum()[::-1]
